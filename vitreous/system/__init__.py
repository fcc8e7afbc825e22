"""The machine and the operating system: cores, memory, devices, files on disk, child processes, native kernels."""
