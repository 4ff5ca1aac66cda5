"""The CPU backend. Its entry is rlx.backends.cpu.backend:CpuBackend; importing this package loads nothing."""
