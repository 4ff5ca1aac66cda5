"""Transports between processes: what rlx.driver.symmetric asks for, over shared memory and over MPI."""
