"""Fused operators: kernels in the language, registered with torch.library as triton_ext::…"""

from .embedding_all_to_all import embedding_all_to_all
from .gemm_all_to_all import gemm_all_to_all
from .gemv_all_reduce import gemv_all_reduce

__all__ = ["embedding_all_to_all", "gemm_all_to_all", "gemv_all_reduce"]
