"""The PTX of our kernels on a CPU: PTX -> LLVM -> host code, which a machine of the tests runs thread by thread."""
