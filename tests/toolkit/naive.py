"""NVIDIA's wheels as `pip install sglang==VERSION` resolves them (Python 3.12, 2026-12-01): the parts of CUDA."""

NAIVE = {
    "0.5.17": """
        cuda-toolkit==13.0.2
        nvidia-cublas==13.1.0.3
        nvidia-cuda-cccl==13.3.5.0.6
        nvidia-cuda-crt==13.5.37
        nvidia-cuda-cupti==13.0.85
        nvidia-cuda-nvcc==13.5.37
        nvidia-cuda-nvdisasm==13.5.37
        nvidia-cuda-nvrtc==13.0.88
        nvidia-cuda-runtime==13.0.96
        nvidia-cudnn-cu13==9.19.0.56
        nvidia-cufft==12.0.0.61
        nvidia-cufile==1.15.1.6
        nvidia-curand==10.4.0.35
        nvidia-cusolver==12.0.4.66
        nvidia-cusparse==12.6.3.3
        nvidia-cusparselt-cu13==0.8.0
        nvidia-nccl-cu13==2.28.9
        nvidia-nvjitlink==13.0.88
        nvidia-nvshmem-cu13==3.4.5
        nvidia-nvtx==13.0.85
        nvidia-nvvm==13.5.37
    """,
    "0.5.23": """
        cuda-toolkit==13.0.3.0
        nvidia-cublas==13.1.1.3
        nvidia-cuda-cccl==13.3.5.0.6
        nvidia-cuda-crt==13.5.37
        nvidia-cuda-cupti==13.0.85
        nvidia-cuda-nvcc==13.5.37
        nvidia-cuda-nvrtc==13.0.88
        nvidia-cuda-runtime==13.0.96
        nvidia-cudnn-cu13==9.24.0.43
        nvidia-cufft==12.0.0.61
        nvidia-cufile==1.15.1.6
        nvidia-curand==10.4.0.35
        nvidia-cusolver==12.0.4.66
        nvidia-cusparse==12.6.3.3
        nvidia-cusparselt-cu13==0.8.1
        nvidia-nccl-cu13==2.30.7
        nvidia-nvjitlink==13.5.37
        nvidia-nvshmem-cu13==3.4.5
        nvidia-nvtx==13.0.85
        nvidia-nvvm==13.5.37
    """,
}
COMPILER = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime"]


def wheels(version: str, *, compiler_only: bool = False) -> list[str]:
    """Return the requirements, all or those that compiling needs."""
    found = NAIVE[version].split()
    return [item for item in found if not compiler_only or item.split("==")[0] in COMPILER]
