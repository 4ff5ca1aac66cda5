"""The registry of backends: name -> folder, imported when first asked for. Nothing else imports a backend.

Other packages add backends with an entry point of group "rlx.backends": device name = "module:BackendClass".
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from rlx.driver.backend import Backend
from rlx.driver.device import ENTRY_POINTS, Device, extensions
from rlx.errors import DeviceUnavailableError

BACKENDS = {
    "cpu": "rlx.backends.cpu.backend:CpuBackend",
    "ref": "rlx.backends.ref.backend:RefBackend",
    "null": "rlx.backends.null.backend:NullBackend",
    "cuda": "rlx.backends.cuda.backend:CudaBackend",
}


@cache
def get(name: str) -> Backend:
    """The backend of the devices called `name`; one instance per process.

    UnknownDeviceError: no such device name. DeviceUnavailableError: the name is known, but no backend for it can be loaded.
    """
    device = Device(name)  # UnknownDeviceError
    try:
        if device.name in BACKENDS:
            module, _, attribute = BACKENDS[device.name].partition(":")
            return getattr(import_module(module), attribute)()
        if device.name in extensions():
            return extensions()[device.name].load()()
    except (ImportError, AttributeError) as e:  # the package is not installed, or has no such class
        missing = f": pip install {e.name}" if e.name and isinstance(e, ImportError) and not e.name.startswith("rlx") else ""
        raise DeviceUnavailableError(f"the backend of {device} cannot be imported ({e}){missing}") from e
    raise DeviceUnavailableError(
        f"this version of rlx has no {device.name.upper()} backend, and no installed package adds one "
        f"(entry points of group {ENTRY_POINTS!r})"
    )


def available() -> dict[str, str | None]:
    """Every device by name: None if usable on this machine ("cpu:0": None), else the reason ("cuda:0": "this version …")."""
    found: dict[str, str | None] = {}
    for name in dict.fromkeys([*(d.name for d in Device.all()), *BACKENDS, *extensions()]):
        try:
            found.update(get(name).probe())
        except DeviceUnavailableError as e:
            found[f"{name}:0"] = str(e)
    return found


def is_available(device: Device | str) -> bool:
    """Whether `device` can be used on this machine now. UnknownDeviceError: no such device name."""
    return _reason(Device.parse(device)) is None


def backend_of(device: Device | str) -> Backend:
    """The backend of a usable device. DeviceUnavailableError: gives the reason, and the devices that are usable."""
    device = Device.parse(device)
    if (reason := _reason(device)) is not None:
        usable = ", ".join(key for key, why in available().items() if why is None)
        raise DeviceUnavailableError(f"device {device} cannot be used: {reason}. Usable here: {usable}")
    return get(device.name)


def _reason(device: Device) -> str | None:
    """None if the device is usable, else the reason why it is not."""
    try:
        found = get(device.name).probe()
    except DeviceUnavailableError as e:
        return str(e)
    if device.key in found or not all(found.values()):
        return found.get(device.key, f"there is no such index; this machine has {', '.join(found)}")
    return next(iter(found.values()))  # no index of it is usable


__all__ = ["available", "backend_of", "get", "is_available"]
