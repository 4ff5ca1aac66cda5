"""python -m rlx: the same as the command `rlx`."""

from rlx.cli.entry import run

if __name__ == "__main__":
    run()
