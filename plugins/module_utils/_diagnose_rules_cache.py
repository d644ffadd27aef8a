# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Rules on kernel caches and on the libraries and packages that were installed."""

from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import HINT, KERNEL_CACHE, rule

CACHE_PATH = (
    r"(?:\.cache\b|cache[\w-]*/|cached_ops|\.triton\b|torchinductor"
    r"|torch_extensions|inductor|deep_gemm|tvm.?ffi"
    r"|cubins?\b|\.config\b|\.nv\b|\.flashinfer|jit|tilelang|flashinfer_cubin|/tmp/)"
)

CACHE_RULES = (
    rule("jit_contention", "jit_lock_wait", r"file_baton\.py"),
    rule("jit_contention", "jit_lock_wait", r"file_baton", frame=r"file_baton"),
    rule(
        "jit_contention",
        "jit_cache_on_network_fs",
        r"Stale file handle|\bESTALE\b|\[Errno 116\]|No locks available|\[Errno 37\]|\bENOLCK\b"
        r"|\.nfs[0-9a-f]{6,}",
    ),
    rule("jit_contention", "jit_race", r"FileExistsError|\[Errno 17\]|os error 17\b", no=r"\.sock\b|/dev/shm|psm_"),
    rule(
        "jit_contention",
        "jit_race",
        r"cannot find \S+\.o\b|(?:/|\b)ld: .*\.o: (?:file not recognized|No such file|error adding)"
        r"|\.o: file (?:not recognized|truncated)|Text file busy|\[Errno 26\]",
        no=r"crt[1in]\.o|Scrt1|crtbegin",
    ),
    rule(
        "jit_contention",
        "jit_race",
        r"ninja: error: (?:opening|loading|writing to|recompacting) (?:the )?(?:build|deps) log"
        r"|ninja: (?:error|warning): (?:premature end of file|failed recompaction|bad deps log)",
        no=r"Permission denied|Read-only|No space",
    ),
    rule("jit_contention", "jit_lock_wait", r"\bfilelock/_api\.py", HINT, no=r"hugging"),
    rule(
        "jit_contention",
        "jit_race",
        r"corrupt\w* (?:compil\w+|cache|artifact)|(?:compil\w+|cache) artifacts?.{0,40}(?:clobber"
        r"|corrupt|overwrit)|clobber",
    ),
    rule(
        "jit_contention",
        "jit_race",
        r"(?:FileNotFoundError|OSError|No such file or directory|Directory not empty"
        rf"|\[Errno 39\]).*{CACHE_PATH}\S*(?:tmp\.pid|\.tmp|tmp_|\.lock|\.so\b|\.cubin|\.json|\.ptx"
        r"|\.cu\b|\.o\b|__triton_launcher|\.ttir|\.llir|\.py\b)",
        no=r"Errno 30|Errno 13|Errno 28|model|config\.json|tokenizer|invalid ELF|too short"
        r"|undefined symbol|JSONDecode|huggingface|/hub/|/dev/",
    ),
    rule(
        "jit_contention",
        "jit_race",
        r"FileNotFoundError|Directory not empty|\[Errno 39\]",
        frame=r"triton/runtime/cache\.py|inductor/(?:codecache|runtime)|flashinfer/jit|deep_gemm|tvm_ffi/cpp",
    ),
    rule(
        "jit_contention",
        "jit_race",
        r"(?:FileNotFoundError|FileExistsError|No such file)\b.{0,60}\b(?:triton|inductor|jit|kernel"
        r"|compile)\b.{0,20}\bcache|\b(?:triton|inductor|jit"
        r"|compile)\b.{0,20}\bcache\b.{0,60}(?:FileNotFoundError|FileExistsError)",
        no=r"huggingface|Errno 13|Errno 30|Errno 28",
    ),
    rule(
        "jit_contention",
        "jit_lock_wait",
        r"(?:waiting|wait|blocked|stuck|spin\w*|block\w*)\b.{0,40}\b(?:for|on"
        r"|at)\b.{0,30}\b(?:file ?lock|\.?lock file|flock|baton|jit lock|lock held|the lock)"
        r"|filelock.{0,20}(?:timeout|\bwaits?\b)|Timeout: The file lock .* could not be acquired"
        r"|(?:stale|leftover|left.?over|orphan\w*) \.?lock|lock (?:file )?(?:is |was )?(?:left|held"
        r"|never released|not released)",
    ),
    rule(
        "jit_cache_bad",
        "jit_cache_corrupt",
        r"invalid ELF header|\bfile too short|ELF load command|wrong ELF class|bad magic number"
        r"|JSONDecodeError.*triton|(?:cubin|kernel|cached).{0,30}(?:is )?(?:corrupt|truncated|empty"
        r"|zero.?(?:byte|length))",
    ),
    rule(
        "jit_cache_bad",
        "jit_cache_corrupt",
        r"JSONDecodeError|UnpicklingError|EOFError|zlib\.error|ZstdError|bad marshal data"
        r"|UnicodeDecodeError",
        frame=r"triton/(?:runtime|compiler)|codecache|inductor|flashinfer/(?:jit|autotuner)|torch/_?dynamo"
        r"|compiler_interface|caching|backends\.py|fx_passes",
    ),
    rule(  # a library that was cut off: its pages past the file's end cannot be read
        "jit_cache_bad",
        "jit_cache_corrupt",
        r"Fatal Python error: Bus error",
        frame=r"tvm_ffi/module\.py:load_module|flashinfer/jit/core\.py:load\b|cpp_extension\.py:_import_module",
    ),
    rule(
        "jit_cache_bad",
        "jit_cache_stale",
        r"^(?:Assertion|Runtime|Key|Attribute|Type|Value|Index)Error\b",
        HINT,
        frame=r"compilation/caching\.py:|aot_compile\.py:|standalone_compile\.py:|codecache\.py:load",
    ),
    rule(
        "jit_cache_bad", "jit_cache_wrong_arch", rf"no kernel image.*{CACHE_PATH}|{CACHE_PATH}\S*\.so.*no kernel image"
    ),
    rule(
        "jit_cache_bad",
        "jit_cache_wrong_arch",
        r"\w\.so\b.{0,40}\b(?:holds?|contains?|has|built|compiled|only)\b.{0,30}\b(?:sm|compute)_\d+",
    ),
    rule(
        "jit_cache_bad",
        "jit_cache_stale",
        rf"{KERNEL_CACHE}\S*\.so: undefined symbol"
        r"|(?:stale|outdated|old)\b.{0,30}\b(?:cached?|jit|compiled) (?:kernel|module|\.so|cache"
        r"|entr)|(?:cached?|jit)\b.{0,30}\b(?:is |are |was )?(?:stale|outdated)\b",
    ),
    rule(
        "jit_cache_not_writable",
        "jit_cache_not_writable",
        r"(?:Permission denied|Read-only file system|Operation not permitted|PermissionError"
        r"|not writable|EACCES|EROFS|os error 13|os error 30|\[Errno 13\]"
        rf"|\[Errno 30\]).*(?:{CACHE_PATH}|/root\b|/home/|/nonexistent|/var/lib/|/projects/)"
        rf"|(?:{CACHE_PATH}|/root|/home/)\S{{0,200}}['\"]?:? ?\W{{0,3}}(?:is )?(?:Permission denied"
        r"|Read-only file system|not writable)|(?<!\[Autotuner\]: )(?:cannot|can't|could not|unable to"
        rf"|failed to) (?:create|write|make|open)\b.{{0,60}}(?:cache|\.triton|inductor)",
        no=r"/dev/nvidia|config\.json|safetensors|\.bin\b|(?:bin|lib)/nvcc|/models?/\S+\.(?:json"
        r"|safetensors)",
    ),
    rule(
        "jit_cache_not_writable",
        "jit_cache_not_writable",
        r"(?:generat|compil|build|jit|kernel|cubin|cutlass|triton"
        r"|inductor)\w*\b.{0,60}(?:Permission denied|Read-only file system|Errno 13|Errno 30)"
        r"|(?:Permission denied|Read-only file system)",
        HINT,
        no=r"/dev/nvidia|config\.json|safetensors|nvcc|huggingface|(?:sh|bash|env): |docker|ssh|sudo",
    ),
    rule(
        "jit_cache_not_writable",
        "jit_cache_not_writable",
        r"Permission denied|Read-only file system|PermissionError",
        frame=r"triton/runtime|inductor|flashinfer|tvm_ffi|deep_gemm|tilelang|cpp_extension|jit/|codecache",
        no=r"nvcc|ninja|/dev/nvidia",
    ),
    rule(
        "jit_cache_not_writable",
        "user_unresolvable",
        r"getpwuid\(\): uid not found|Could not determine home directory|no home directory"
        r"|cannot find name for user ID|HOME(?: environment variable)? (?:is )?(?:not set|unset"
        r"|not writable)",
    ),
    rule(
        "cubin_unavailable",
        "cubin_download_failed",
        r"Max retries reached\. Download failed|edge\.urm\.nvidia\.com|(?:fail\w*|error\w*|unable"
        r"|could not|cannot|timed? out)\b.{0,60}\b(?:download|fetch|get|obtain"
        r"|load)\w*\b.{0,60}\bcubins?\b|cubins?\b.{0,60}\b(?:download|fetch)\w*\b.{0,30}(?:fail|error"
        r"|timed? out)|(?:BatchedGemmEnums|flashInferMetaInfo"
        r"|KernelMetaInfo)\S*\.h\b.{0,20}(?:not found|No such)|cubin.{0,40}(?:checksum|sha256"
        r"|hash) mismatch|(?:fail\w*|error\w*) while fetching cubins?",
    ),
    rule(
        "cubin_unavailable",
        "cubin_prefetch_incomplete",
        r"Artifact not found locally|cubins?\b(?!-).{0,40}(?:not found|missing|incomplete|does not exist)"
        r"|FLASHINFER_NO_DOWNLOAD|missing cubins?",
    ),
    rule(
        "cubin_unavailable",
        "jit_disabled_module_missing",
        r"FLASHINFER_DISABLE_JIT|MissingJITCacheError|JIT (?:compilation )?is disabled",
    ),
)
_ABI = r"_ZNK?\w*(?:c10|2at|5torch|at6Tensor|at4|cuda)"
LIBRARY_RULES = (
    rule(
        "runtime_lib_shadowed",
        "ld_library_path_shadowing",
        r"symbol:? \W?__nvJitLink|__nvJitLink\w*.{0,60}(?:undefined|not defined|version)"
        r"|undefined symbol:? \W?(?:nccl[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|nvrtc"
        r"|nvJitLink)\w*|symbol \w+ version lib(?:nvJitLink|cublas|cusparse|cudnn|cudart"
        r"|cufft)\S* not defined|cuDNN version incompatibility"
        r"|PyTorch was compiled against .* but found runtime version"
        r"|CUDNN_STATUS_(?:SUBLIBRARY_)?VERSION_MISMATCH",
    ),
    rule(
        "runtime_lib_missing",
        "cuda_lib_missing_at_import",
        r"lib[\w+-]+(?:\.[\w-]+)*?\.so[.\d]*\W{0,3}(?:cannot open shared object|not found\b"
        r"|: No such file)|cannot open shared object file: No such file|(?:could not|cannot|unable to"
        r"|failed to) (?:load|find|dlopen|open)\b.{0,40}\blib(?!cuda\.so|nvidia-ml)[\w+-]+\.so"
        r"|Library not found: lib|Unable to load any of \{?lib|DLL load failed",
        no=r"libcuda\.so|libnvidia-ml|invalid ELF|cached_ops|\.cache/|torch_extensions|link_cuda_dso",
    ),
    rule(
        "runtime_lib_missing",
        "glibc_too_old",
        r"version [`'\"](?:GLIBC|GLIBCXX|CXXABI|GCC|OPENSSL)_[\w.]+['\"`]? not found|requires? glibc"
        r"|GLIBC\w* ?(?:>=|too old)",
    ),
    rule(
        "package_mismatch",
        "torch_abi_mismatch",
        rf"undefined symbol:? \W?(?:{_ABI}|aoti_torch|torch_|THP|_Z)|undefined symbol:?\s*(?:TVM|tvm)",
        no=r"\.cache/|cached_ops|torch_extensions/|__nvJitLink|libcuda\b",
    ),
    rule(
        "package_mismatch",
        "torch_abi_mismatch",
        r"undefined symbol",
        HINT,
        no=r"__nvJitLink|\.cache/|cached_ops|torch_extensions|nccl[A-Z]|cublas|cudnn|cusparse",
    ),
    rule(
        "package_mismatch",
        "flashinfer_package_mismatch",
        r"does not match flashinfer version|flashinfer-(?:cubin|jit-cache)\b.{0,60}(?:does not match"
        r"|mismatch|incompatible)",
        no=r"Ignoring incompatible",
    ),
    rule(
        "package_mismatch",
        "package_too_old",
        r"minimum required version|which is less than the (?:minimum )?required"
        r"|is installed with version .*(?:required|less than)|(?:requires|required|need\w*"
        r"|Please install|Please upgrade|Please update)\b.{0,40}\b(?:sgl.kernel|sglang.kernel"
        r"|flashinfer\w*|transformers|torch|triton|xgrammar|tokenizers|tvm.ffi|outlines|vllm|numpy"
        r"|protobuf|nccl)\b.{0,6}(?:[><=!~]=?|version|at least)\W*\d|VersionConflict"
        r"|DistributionNotFound|PackageNotFoundError|requires numpy[<>]|compiled using NumPy 1"
        r"|numpy\.\w+ size changed|(?:sgl.kernel|flashinfer|torch|triton|transformers|xgrammar"
        r"|tvm.ffi)\S* version.{0,40}(?:mismatch|incompatible|too old|not (?:match|compatible))|(?:is"
        r"|are) incompatible with (?:the )?installed|pip.{0,20}dependency resolver"
        r"|has requirement .* but you have",
        no=r"Ignoring incompatible|does not recognize",
    ),
    rule(
        "package_mismatch",
        "package_broken",
        r"ImportError: cannot import name|ModuleNotFoundError|No module named '"
        r"|AttributeError: module '(?:flashinfer|sgl_kernel|torch|triton|transformers|xgrammar"
        r"|outlines|tvm_ffi|cutlass|numpy|vllm|deep_gemm|google|huggingface_hub|cuda"
        r"|flash_attn)[\w.]*' has no attribute|'_OpNamespace' '\w+' object has no attribute"
        r"|operator \w+::\w+ does not exist|(?:sgl_kernel|flashinfer|vllm|_C)::\w+\(\) (?:is missing"
        r"|expected|Expected|takes)|Torch not compiled with CUDA|not compiled with CUDA (?:enabled"
        r"|support)|schema.{0,30}mismatch|Could not import module"
        r"|Descriptors cannot be created directly|\brequires [\"'`][\w.\[\]-]+[\"'`] to be installed",
        no=r"No module named '?ninja|Ignore import|transformers_modules",
    ),
    rule(
        "package_mismatch",
        "api_mismatch",
        r"TypeError: .*(?:got an unexpected keyword argument|missing \d+ required positional"
        r"|takes \d+ positional arguments? but|takes from \d+ to)|(?:AttributeError"
        r"|TypeError): .*(?:incompatible function arguments|has no attribute '(?:plan|forward|run"
        r"|begin_forward)')|Mismatched (?:number of arguments|type on argument)",
        frame=r"flashinfer|sgl_kernel|triton|xgrammar|tvm_ffi|outlines|deep_gemm|flash_attn|vllm/_",
    ),
    rule(
        "package_mismatch",
        "package_broken",
        r"^(?:Attribute|Type|Name|Import|Value|Runtime|Key|Assertion)Error\b",
        HINT,
        frame=r":<module>\Z|transformers/utils/import_utils\.py:|importlib/metadata",
        no=r"CUDA_HOME|cuda_home|nvcc|HIP|ROCM",
    ),
    rule(
        "package_mismatch",
        "api_mismatch",
        r"TypeError: \S+\(\) (?:got an unexpected keyword argument|missing \d+ required positional)",
        HINT,
    ),
    rule(
        "package_mismatch",
        "api_mismatch",
        r"(?:Wrapper|flashinfer|sgl_kernel|xgrammar|triton"
        r"|deep_gemm)\w*(?:\.\w+)*\(\) (?:got an unexpected keyword|missing \d+ required|takes )",
    ),
    rule(
        "no_kernel_image",
        "no_kernel_image_for_gpu",
        r"no kernel image is available|NoKernelImageForDevice|invalid device function"
        r"|NO_BINARY_FOR_GPU|cudaErrorInvalidDeviceFunction",
    ),
    rule(
        "no_kernel_image", "no_kernel_image_for_gpu", r"is not compatible with the current PyTorch installation", HINT
    ),
)
