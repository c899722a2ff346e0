"""Linear layers with faster kernels than torch's: fused SwiGLU (Triton), packed weights (oneDNN).

``swiglu`` needs Triton and must be imported only after ``specdec.attention.support`` reported no
problem. Triton kernels also run on the CPU, slowly, under its interpreter (TRITON_INTERPRET=1).
"""
