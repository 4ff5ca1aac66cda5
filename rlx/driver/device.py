"""Device: a piece of hardware, by name and index. A Device may exist without being usable here: rlx.backends says which are."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from rlx.errors import UnknownDeviceError, known
from rlx.records import record

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NAMES = ("cpu", "cuda", "rocm", "metal", "mlx", "ane", "tpu", "gpu", "vulkan", "opengl", "directx", "webgpu")
TEST_NAMES = ("ref", "null")  # the interpreter and the recorder: always available, never listed by Device.all()
ENTRY_POINTS = "rlx.backends"  # other packages add devices under this entry point group: device name = "module:Backend"


@record
class Device:
    """The `index`-th device called `name`: Device.CPU, Device.CUDA.at(1), Device("cuda", 1), Device.parse("cuda:1").

    `gpu` is the portable GPU device (wgpu). UnknownDeviceError: neither rlx nor an installed package knows the name.
    """

    name: str
    index: int = 0

    CPU: ClassVar[Device]
    CUDA: ClassVar[Device]
    ROCM: ClassVar[Device]
    METAL: ClassVar[Device]
    MLX: ClassVar[Device]
    ANE: ClassVar[Device]
    TPU: ClassVar[Device]
    GPU: ClassVar[Device]
    VULKAN: ClassVar[Device]
    OPENGL: ClassVar[Device]
    DIRECTX: ClassVar[Device]
    WEBGPU: ClassVar[Device]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            raise UnknownDeviceError(f"a device is a name and an index from 0, got {self.name!r} and {self.index!r}")
        object.__setattr__(self, "name", self.name.lower())
        if self.name not in NAMES and self.name not in TEST_NAMES and self.name not in extensions():
            from difflib import get_close_matches

            names = [*NAMES, *TEST_NAMES, *extensions()]
            close = get_close_matches(self.name, names, n=2)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {known(names)}"
            raise UnknownDeviceError(f"no device is called {self.name!r}; {hint}")

    def __str__(self) -> str:
        return self.name.upper() + (f":{self.index}" if self.index else "")

    def __repr__(self) -> str:
        return f"Device({self.key!r})"

    @property
    def key(self) -> str:
        """Name and index as backends report them: "cuda:0"."""
        return f"{self.name}:{self.index}"

    def at(self, index: int) -> Device:
        """The device of the same name with another index."""
        return Device(self.name, index)

    @staticmethod
    def parse(text: str | Device) -> Device:
        """The device named by a text such as "cuda", "cuda:1" or "CUDA:1". A Device is returned unchanged."""
        if isinstance(text, Device):
            return text
        found = re.fullmatch(r"\s*([A-Za-z]\w*)(?::([0-9]{1,6}))?\s*", text) if isinstance(text, str) else None
        if found is None:
            raise UnknownDeviceError(f"a device is written NAME or NAME:INDEX, such as 'cpu' or 'cuda:1'; got {text!r}")
        return Device(found[1], int(found[2] or 0))

    @staticmethod
    def all() -> tuple[Device, ...]:
        """Every kind of device that rlx has a name for, usable here or not (rlx.is_available says which are usable)."""
        return tuple(Device(name) for name in NAMES)


@cache
def extensions() -> dict[str, EntryPoint]:
    """Devices that installed packages add, by name."""
    from importlib.metadata import entry_points  # takes a tenth of the time of `import rlx`, and is rarely needed

    return {e.name.lower(): e for e in entry_points(group=ENTRY_POINTS)}


for _name in NAMES:
    setattr(Device, _name.upper(), Device(_name))
