"""Machine code for the CPU, compiled at run time by the LLVM inside the triton wheel."""
