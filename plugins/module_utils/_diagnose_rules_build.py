# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Rules on what is built on the host: toolkit, compilers, linker."""

from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import SYMPTOM, rule

_TOOL = (
    r"(?:ninja|gcc|g\+\+|c\+\+|cc|c99|clang(?:\+\+)?|cmake|make|x86_64-linux-gnu-g(?:cc"
    r"|\+\+)(?:-\d+)?|g(?:cc|\+\+)-\d+|cc1plus|cc1|as|ld)"
)
_CUDA_TOOL = r"(?:cicc|ptxas|cudafe\+\+|fatbinary|nvlink|bin2c|cuobjdump|nvdisasm)"
_CUDA_HEADER = (
    r"(?:cuda\w*|curand\w*|cublas\w*|cusparse\w*|cusolver\w*|cufft\w*|cudnn\w*|nvrtc\w*|nvml"
    r"|nvJitLink\w*|cuComplex|cudaGL|nvToolsExt\w*"
    r"|nvtx3/\S+|crt/\S+|nv/\S+|cuda/\S+|cub/\S+|thrust/\S+|cooperative_groups\S*"
    r"|device_launch_parameters|vector_types|driver_types"
    r"|math_constants|mma|cuda_fp\w+|builtin_types|host_defines|texture_types|cccl/\S+"
    r"|nvfunctional|fatbinary\w*)(?:\.(?:h|hpp|cuh|inl))?"
)
_STD_HEADER = r"(?:math|stdlib|cmath|cstdlib|string|stdio|limits|wchar|time|ctype|errno|cstddef)(?:\.h)?"
_CUDA_LIB = (
    r"(?:cuda|cudart|cudart_static|cudadevrt|nvrtc|cublas|cublasLt|curand|cusparse|cusolver|cufft"
    r"|cupti|nvToolsExt|nvJitLink|cudnn|nvrtc-builtins|nvidia-ml|culibos)"
)

BUILD_RULES = (
    rule(
        "nvcc_not_found",
        "nvcc_not_found",
        r"Could not find nvcc|nvcc\S*: (?:command )?not found|nvcc not found"
        r"|(?:No such file or directory|Permission denied)[:\s'\"]+\S*\bnvcc\b"
        r"|\bnvcc\b['\"]?:? (?:No such file|Permission denied|cannot execute)|(?:cannot|can't"
        r"|could not|unable to|failed to) (?:find|locate|execute|run) (?:the )?\W?nvcc|which: no nvcc"
        r"|NVCC (?:compiler )?(?:is )?(?:not found|missing|unavailable)|nvcc is not (?:installed"
        r"|available|in)|Could not find (?:the )?CUDA (?:installation|toolkit|compiler)",
        no=r"(?<![\w.])/usr/bin/nvcc: not found",
    ),
    rule(
        "nvcc_not_found",
        "cuda_home_unset",
        r"CUDA_HOME\W*(?:environment variable )?(?:is )?(?:not set|unset|missing|undefined|is None)"
        r"|(?:set|find|detect|locate|determine) (?:the )?(?:`|')?CUDA_HOME|CUDA_HOME\W{0,3}(?:must be"
        r"|needs to be|has to be|not found|could not be)|(?:CUDA_PATH|CUDA_ROOT"
        r"|CUDAToolkit_ROOT) (?:is )?not set|assert (?:cuda|CUDA)_home is not None"
        r"|CUDAToolkit \(missing",
        no=r"does not exist|is not a (?:folder|directory)",
    ),
    rule("nvcc_not_found", "wrong_backend_compiler", r"bin/hipcc|hipcc\S*: (?:command )?not found|ROCM_HOME.*not"),
    rule(
        "cuda_home_invalid",
        "cuda_home_invalid",
        r"(?:^|[\s'\"=]):[/\w.-]*/bin/nvcc|/bin/nvcc:[/\w]|\bcuda_home = \S*:/"
        r"|CUDA_HOME\b.{0,80}(?:does not exist|doesn't exist|is not a (?:folder|directory)"
        r"|not a valid|points? to|relative|contains? ['\"]?:)",
    ),
    rule(
        "cuda_home_invalid",
        "cuda_home_invalid",
        rf"fatal error: {_STD_HEADER}: No such file|#include_next <{_STD_HEADER}>"
        r"|/usr/bin/nvcc\b.*-isystem /usr/include\b|(?<![\w.])/usr/bin/nvcc: not found",
    ),
    rule(
        "toolkit_incomplete",
        "cuda_lib64_missing",
        rf"cannot find -l{_CUDA_LIB}\b|(?:cannot|could not|unable to) (?:find"
        rf"|locate)\W+lib{_CUDA_LIB}(?:\.so|\.a)\b(?!\.\d)|library not found for -l{_CUDA_LIB}\b"
        rf"|ld.*{_CUDA_LIB}\.so: No such file|\bld(?:\.\w+)? ?: .{{0,40}} -l{_CUDA_LIB}(?!\w)",  # in any language
        no=r"libcuda\.so\.1|libnvidia-ml",
    ),
    rule(
        "toolkit_incomplete",
        "cuda_headers_missing",
        r"(?:fatal error: ['\"]?|cannot open source file ['\"]"
        rf"|could not open ['\"]?){_CUDA_HEADER}['\"]?(?::|\W|$)|{_CUDA_HEADER}:? (?:No such file"
        r"|file not found)",
    ),
    rule(
        "toolkit_incomplete",
        "cicc_missing",
        rf"\b{_CUDA_TOOL}['\"]?: (?:\d+: )?(?:command )?(?:not found|No such file|Permission denied)"
        rf"|No such file or directory: ['\"]\S*{_CUDA_TOOL}['\"]|(?:cannot|can't|could not) (?:find"
        rf"|run|execute) (?:the )?\W?{_CUDA_TOOL}\b|libdevice\S*(?: not found|: No such)"
        r"|Cannot find (?:a symlink to )?libdevice|nvvm\S* (?:not found|No such file)",
    ),
    rule(
        "cuda_version_skew",
        "cuda_compiler_header_mismatch",
        r"CUDA compiler and CUDA toolkit headers are incompatible|\b(?:cub|thrust"
        r"|cuda)::\S*.{0,160}has no member|namespace ['\"](?:cub|thrust|cuda)\S*['\"] has no member"
        r"|fast_mod_div|Unsupported \.version [\d.]+; current version is"
        r"|detected CUDA version \([\d.]+\) mismatches"
        r"|CUDA version.{0,60}mismatch\w*.{0,80}(?:PyTorch|torch|compile)|(?:CCCL|libcu\+\+"
        r"|libcudacxx|CUB|Thrust)\b.{0,80}(?:requires|incompatible|not (?:compatible|support)"
        r"|version)|(?:identifier|name) ['\"]__\w*(?:nv_|cuda|cudart|tf32|fp8|fp4"
        r"|grid_constant)\w*['\"] is undefined|nvcc.{0,60}version.{0,60}(?:differs|different|mismatch"
        r"|does not match)",
        no=r"unsupported GNU version",
    ),
    rule(
        "nvcc_too_old_for_gpu",
        "nvcc_too_old_for_gpu",
        r"Unsupported gpu architecture|SM ?\d+(?:\.\w|\d)?\+?\S* requires CUDA"
        r"|nvcc\b.{0,80}(?:does not support|doesn't support|too old for)|requires (?:CUDA"
        r"|nvcc)(?: toolkit)?(?: version)? ?(?:>=|at least|or newer)? ?1[2-9]\.\d"
        r"|CUDA (?:toolkit )?1\d\.\d (?:or (?:newer|later|higher|above)|\+) (?:is )?required",
        no=r"flashinfer requires GPUs",
    ),
    rule(
        "nvcc_too_old_for_gpu",
        "ptxas_too_old_for_gpu",
        r"Value ['\"]?sm_\w+['\"]? is not defined for option|ptxas\b.*(?:--?gpu-name"
        r"|-arch)[= ]sm_\w+.*(?:returned|failed|exit|non-zero|error)"
        r"|['\"]?sm_\w+['\"]? is not a recognized processor|target ['\"]?sm_\w+['\"]? (?:is )?(?:not"
        r"|un)\W?(?:supported|recognized|defined)|LLVM ERROR: .*sm_\d+|unknown (?:target"
        r"|gpu) (?:CPU )?['\"]?sm_\d+",
    ),
    rule("nvcc_too_old_for_gpu", "ptxas_too_old_for_gpu", r"PTXASError: |Internal Triton PTX codegen error", SYMPTOM),
    rule(
        "arch_list_wrong",
        "arch_list_wrong",
        r"FlashInfer requires (?:GPUs with )?sm|No supported CUDA architectures? found|no (?:valid"
        r"|supported) (?:CUDA )?arch\w*",
        SYMPTOM,
    ),
    rule(
        "arch_list_wrong",
        "arch_list_wrong",
        r"Unknown CUDA arch|(?:TORCH|FLASHINFER)_CUDA_ARCH_LIST\b.{0,80}(?:invalid|malformed"
        r"|unsupported|not (?:valid|support|match)|wrong|error|empty|cannot)"
        r"|invalid (?:cuda )?arch(?:itecture)?(?: list)?\b.{0,20}['\"\d]",
    ),
    rule(
        "arch_list_wrong",
        "arch_list_wrong",
        r"ValueError: (?:too many|not enough) values to unpack|ValueError: invalid literal for int\(\)",
        frame=r"compilation_context|cpp_extension|arch",
    ),
    rule(
        "arch_list_wrong",
        "arch_list_wrong",
        r"compilation_context.{0,200}(?:values to unpack|invalid literal)|(?:values to unpack"
        r"|invalid literal).{0,80}(?:compilation_context|arch_list)",
    ),
    rule(
        "build_tools_missing",
        "build_tool_missing",
        rf"No such file or directory: ['\"](?:/usr/(?:local/)?bin/|/\S+/)?{_TOOL}['\"]|(?:^"
        rf"|[\s:/]){_TOOL}: (?:command )?not found|(?:^|\s)\S*/{_TOOL}: No such file or directory"
        rf"|unable to execute ['\"]?{_TOOL}|(?:FileNotFoundError|not found"
        rf"|missing)\W.{{0,30}}['\"]{_TOOL}['\"]|['\"]{_TOOL}['\"] (?:is )?(?:not found|missing)"
        r"|cannot execute ['\"`]?(?:cc1plus|cc1|as|ld)",
    ),
    rule(
        "build_tools_missing",
        "ninja_not_found",
        r"Ninja is required|(?:could not|cannot|can't|unable to) (?:find|locate"
        r"|run) (?:the )?['\"`]?ninja|ninja (?:is )?not (?:found|installed|available|on)"
        r"|which: no ninja|no module named '?ninja",
    ),
    rule(
        "build_tools_missing",
        "host_compiler_missing",
        r"Failed to find (?:a )?C(?:\+\+)? compiler|No working C\+\+ compiler|InvalidCxxCompiler"
        r"|no acceptable C compiler|(?:could not|cannot|unable to) (?:find|locate) (?:a |any "
        r"|the )?(?:suitable |host |C(?:\+\+)? )*compiler|(?:C|C\+\+|CXX"
        r"|host) compiler.{0,30}(?:not found|missing|not (?:able|installed))|No supported (?:gcc"
        r"|host compiler)|Failed to preprocess host compiler|g(?:cc|\+\+) (?:is )?(?:not installed"
        r"|not found)|error: command ['\"]\S*g(?:cc|\+\+)['\"] failed: No such",
    ),
    rule(
        "build_tools_missing",
        "python_headers_missing",
        r"\bPython\.h\b|pyconfig\.h: No such file|python3?-dev\b.{0,40}(?:missing|required|install)",
    ),
    rule(
        "build_tools_missing",
        "host_compiler_unsupported",
        r"unsupported GNU version|unsupported clang version|gcc versions? later than \d+"
        r"|#error -- unsupported|host compiler.{0,40}(?:not supported|unsupported|too (?:new|old))"
        r"|-allow-unsupported-compiler",
    ),
    rule(
        "build_tools_missing",
        "host_header_missing",
        r"fatal error: ['\"]?[\w/.+-]+(?:\.h|\.hpp)?['\"]?: No such file|cannot find -l(?:stdc\+\+"
        r"|gcc|gcc_s|c|m|python[\d.]*|pthread|dl|rt|numa|z)(?!\w)|cannot find (?:crt[1in]|Scrt1"
        r"|crtbegin\w*)\.o",
        no=rf"fatal error: ['\"]?(?:{_CUDA_HEADER}|{_STD_HEADER}|flashinfer/|cutlass/|cute/|BatchedGemm"
        r"|flashInferMeta|tvm/)",
    ),
    rule(
        "jit_compile_oom",
        "jit_compile_oom",
        r"FAILED: \[code=137\]|died due to signal 9|Killed signal terminated program"
        r"|virtual memory exhausted|fatal error: Killed|(?:cc1plus|cicc|ptxas|nvcc|cudafe\+\+"
        r"|ninja)\b.{0,60}(?:\bKilled\b|signal 9\b|SIGKILL|out of memory|oom)|(?:oom|killed"
        r"|out of memory).{0,60}\b(?:cc1plus|cicc|ptxas|nvcc|cudafe\+\+)\b|cc1plus: out of memory"
        r"|c\+\+: internal compiler error: Killed|exit(?:ed with)? (?:code|status) 137.{0,40}(?:ninja"
        r"|nvcc|compil)|(?:ninja|nvcc|compil\w+).{0,40}exit(?:ed with)? (?:code|status) 137",
    ),
    rule(
        "jit_build_failed",
        "jit_build_failed",
        r"Ninja build failed|ninja exited with status|ninja: build stopped|Error building extension"
        r"|(?:kernel|module|JIT) (?:compilation|build) failed|nvcc .*(?:exit|return)\w* (?:code"
        r"|status) [1-9]|NVCC compilation failed|NVRTC_ERROR_COMPILATION"
        r"|errors? detected in the compilation of|RuntimeError: Failed to (?:compile|build)"
        r"|CompilationError",
        SYMPTOM,
    ),
)
