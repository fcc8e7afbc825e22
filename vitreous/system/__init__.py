"""Machine and operating system: cores, memory, devices, files on disk, child processes, native kernels."""
