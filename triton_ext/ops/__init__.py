"""Fused operators: kernels in the language, registered with torch.library as triton_ext::…"""

from .embedding import embedding_all_to_all
from .gemm import gemm_all_to_all
from .gemv import gemv_all_reduce

__all__ = ["embedding_all_to_all", "gemm_all_to_all", "gemv_all_reduce"]
