"""Transports between processes: implementations of rlx.driver.symmetric.SymmetricTransport over shared memory and over MPI."""
