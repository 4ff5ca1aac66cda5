"""Machine code for this process: compiling LLVM IR, generated functions callable from Python, fast calls, the disk cache of code.

The driver and the backends depend on this package. It depends on the kernel IR, but on neither of them.
"""
