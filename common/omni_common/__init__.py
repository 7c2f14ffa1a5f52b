"""What every Omnibus process shares: frames, sockets, tensors in shared memory, pipeline files. Imports no torch."""
