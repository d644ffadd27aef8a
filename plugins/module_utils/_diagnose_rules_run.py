# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Rules on GPU support, memory, ports, models, kernels and stalls."""

from __future__ import annotations

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_rules import HINT, SYMPTOM, rule

_LOOP = r"(?:https?://)?(?:0\.0\.0\.0|127\.0\.0\.1|localhost|\[?::1?\]?)"
_BAD_STATUS = r"(?:403|407|50[234])"

GPU_RULES = (
    rule(
        "backend_unsupported_on_gpu",
        "backend_unsupported_on_gpu",
        r"(?:is |are )?only (?:be )?(?:supported|available|implemented|compatible|works?|runs?) (?:on"
        r"|for|with|by)\b.{0,60}\b(?:SM|sm_?|GPU|Hopper|Blackwell|Ampere|Ada|Turing|H100|B200|compute"
        r"|CUDA|NVIDIA|arch|device|Nvidia)|only supports? .{0,60}\b(?:SM ?\d|sm_?\d|Hopper|Blackwell"
        r"|Ampere|GPUs?\b|compute capability|head.?dim)|(?:requires?|needs?) .{0,40}\b(?:SM ?\d"
        r"|sm_?\d\d|Hopper|Blackwell|Ampere|compute capability|GPU with|GPUs with|architecture)"
        r"|(?:not|isn't|un)\W?supported (?:on|for|by|in) (?:this |your |the )?(?:current )?(?:GPU"
        r"|device|architecture|platform|hardware|SM|sm_?\d|compute capability|Hopper|Blackwell|Ampere"
        r"|CUDA arch)|does(?: not|n't) (?:currently )?support (?:SM ?\d|sm_?\d|compute capability"
        r"|this GPU|your GPU|GPU|device capability|Blackwell|Hopper)|Unsupported (?:SM|GPU"
        r"|compute capability|architecture|device capability|arch|CUDA arch)\b(?! ?(?:list))"
        r"|not (?:implemented|available|built) (?:on|for) (?:this |sm_?|SM ?|arch|GPU|compute)"
        r"|(?:requires?|needs?) (?:a )?(?:device|GPU)\b.{0,20}\bcapability|\bGPU has (?:compute )?capability",
        no=r"Unsupported gpu architecture|FlashInfer requires (?:GPUs with )?sm|requires CUDA"
        r"|does not recognize|driver|Falling back|fallback|No supported|Model architectures"
        r"|are not supported for now|unavailable:",
    ),
    rule(
        "backend_unsupported_on_gpu",
        "backend_unsupported_on_gpu",
        r"Unsupported architecture\b(?!s)|Feature '[^']+' (?:not supported|requires)"
        r"|\.target\b.{0,30}(?:not support|requires)|Arch conditional MMA|(?:tcgen05|wgmma|mma\.sync"
        r"|cp\.async\.bulk|TMA|setmaxnreg)\b.{0,60}(?:not supported|unsupported|requires|illegal)"
        r"|not supported on \.target|No (?:valid|suitable|supported"
        r"|available) (?:attention )?(?:backend|kernel)s?\b|Bfloat16 is only supported"
        r"|got unsupported (?:arch|GPU|device)|cutlass\b.{0,80}(?:not supported|Error Internal"
        r"|cannot implement|invalid (?:argument|problem))|TllmGenFmhaRunner|Missing TRTLLM-GEN kernel"
        r"|trtllm.?gen.{0,60}(?:not (?:found|support)|unsupported|missing)"
        r"|Failed to initialize (?:the )?(?:cutlass|TMA)|[Mm]inimum capability|SM count"
        r"|backend\W+\S+ (?:is )?not supported|(?:attention|moe|gemm"
        r"|runner)[\w -]*backend.{0,60}(?:not support|unsupported|only support|requires|incompatible)",
        no=r"Model architectures|does not recognize|Unsupported gpu architecture|requires CUDA"
        r"|Falling back|unavailable:|No (?:valid|supported) CUDA arch",
    ),
    rule(
        "backend_unsupported_on_gpu",
        "quantization_unsupported_on_gpu",
        r"quantization\b.{0,60}not supported for|fp8e4nv\b.{0,40}not supported|(?:fp8|fp4|nvfp4|mxfp4"
        r"|e4m3|awq|gptq|marlin|int8|int4|w8a8|w4a16|bf16)\w*\b.{0,60}(?:not supported (?:on|for|by"
        r"|in)|only supported|unsupported (?:on|for)|requires? (?:SM|sm|compute|GPU|Hopper|Blackwell"
        r"|Ada|device))|Current capability: \d|current GPU\W.{0,40}capability",
        no=r"Falling back|fallback|Model architectures|weight\b.*not quantized",
    ),
    rule(
        "backend_unsupported_on_gpu",
        "kernel_smem_too_large",
        r"out of resources?: shared memory|OutOfResources|too much shared (?:data|memory)"
        r"|uses too much shared|shared memory.{0,40}(?:exceed|Required: \d+, Hardware limit|too large"
        r"|larger than)|Required: \d+, Hardware limit|MaxDynamicSharedMemorySize|(?:exceed\w*"
        r"|larger than|more than).{0,30}shared memory|too many resources requested for launch",
        no=r"/dev/shm|segment",
    ),
    rule(
        "backend_unsupported_on_gpu",
        "custom_allreduce_failed",
        r"(?:custom_?all_?reduce|register_graph_buffers|register_buffer|trtllm_allreduce"
        r"|allreduce_fusion|mscclpp|symm_?mem\w*|multicast)\b.{0,120}(?:invalid argument"
        r"|not supported|fail|error|invalid)",
    ),
    rule(
        "backend_unsupported_on_gpu",
        "custom_allreduce_failed",
        r"invalid argument|not supported|invalid resource handle",
        frame=r"custom_all_?reduce|allreduce|all_reduce|symm_mem|mscclpp",
    ),
    rule(
        "state_degraded",
        "performance_degraded",
        r"Performance might be sub-?optimal|Using default (?:MoE|W8A8|config)"
        r"|sub-?optimal performance|performance (?:may|might|will) be (?:degraded|reduced|poor|low)",
        HINT,
    ),
    rule(
        "state_degraded",
        "performance_degraded",
        r"(?:falls?|falling|fell) back to .{0,40}(?:torch_native|triton|slower|eager|backend)",
        SYMPTOM,
    ),
    rule("state_degraded", "flashinfer_package_ignored", r"Ignoring incompatible", HINT),
)
MEMORY_RULES = (
    rule(
        "gpu_memory_in_use",
        "gpu_memory_in_use",
        r"Free memory on device .*(?:less than|desired)|(?:used|occupied|held"
        r"|taken) by (?:an)?other process|other processes? (?:is|are) using"
        r"|nvidia-smi still (?:shows?|lists?)|still (?:hold|holds|holding|occup\w+"
        r"|us\w+)\b.{0,30}(?:GPU|VRAM|memory)|(?:GPU"
        r"|VRAM) memory\b.{0,40}(?:not (?:been )?(?:released|freed)|still (?:in use|allocated"
        r"|occupied|held))|Initial free memory .*other processes|orphan\w*.{0,60}(?:GPU|VRAM|memory)"
        r"|(?:leftover|zombie|stale|defunct) process\w*.{0,60}(?:GPU|VRAM|memory)",
        no=r"reducing memory usage",
    ),
    rule(  # before this server took any: not even a CUDA context fits
        "gpu_memory_in_use",
        "gpu_memory_in_use",
        r"CUDA error: out of memory",
        frame=r"parallel_state\.py:(?:__init__|init_\w+)|bootstrap\.py:init_torch_distributed"
        r"|cuda/__init__\.py:(?:_lazy_init|set_device)",
    ),
    rule("gpu_memory_in_use", "gpu_memory_imbalance", r"memory capacity is unbalanced|Some GPUs may be occupied"),
    rule(
        "state_cache_too_small",
        "state_cache_too_small",
        r"Mamba cache blocks|Not enough space for mamba|(?:mamba|state|ssm|linear.attention"
        r"|conv)[\w ]*(?:cache|pool|slots?|state)s?\b.{0,80}(?:too small|not enough|exceed\w*"
        r"|exhaust\w*|insufficient|no (?:free|available)|out of|less than|fewer than|smaller than"
        r"|is 0|full\b)|max.?mamba.?cache.?size|mamba.full.memory.ratio|state_cap\b|(?:not enough"
        r"|insufficient|no free|out of)\b.{0,40}\b(?:mamba|ssm|state (?:cache|pool|slots?))",
        no=r"server_args|Mamba Cache is allocated|^max_running_requests is capped to \d+ by the mamba",
    ),
    rule(
        "kv_pool_too_small",
        "kv_pool_too_small",
        r"Not enough memory\.? .*mem.fraction|Not enough memory\. Please try"
        r"|larger than the profiled value|leaves? no (?:GPU )?memory for the KV"
        r"|No available memory for the cache blocks|KV pool holds \d+ tokens, fewer|(?:KV|token_to_kv"
        r"|memory) pool.{0,40}(?:too small|exhaust|full\b|is 0|not enough|negative|empty)"
        r"|max_total_num_tokens\W+-?0\b|(?:Prefill|Decode) out of memory|(?:raise|increase"
        r"|increasing) .{0,10}`?--?(?:mem.fraction|gpu.memory.utili)|(?:num_gpu_blocks|# ?(?:GPU"
        r"|CUDA) blocks)\W+0\b|KV cache.{0,60}(?:not enough|insufficient|too small|exceed|no space"
        r"|cannot fit)|out of KV|Not enough (?:memory|space|blocks?)\b.{0,60}\bKV",
        no=r"mamba cache|Mamba cache|out of memory\. Tried|max_num_seqs",
    ),
    rule(
        "kv_pool_too_small",
        "context_does_not_fit",
        r"KV cache is needed, which is larger|larger than the (?:available"
        r"|maximum number of tokens that can be stored in) KV cache|estimated maximum model length"
        r"|exceeds the maximum allowed length|(?:input|prompt|request|sequence)\b.{0,60}(?:exceed\w*"
        r"|longer than|larger than|too long)\b.{0,60}(?:KV|pool|max_total|maximum (?:allowed|total)"
        r"|token capacity)|(?:max.?model.?len|max seq len|context.?length)\b.{0,80}(?:larger|greater"
        r"|longer|exceed\w*|more|too (?:large|long)|does not fit)\b.{0,80}(?:KV|cache|memory|blocks"
        r"|pool|tokens)|decrease max.?model.?len",
    ),
    rule(
        "gpu_oom",
        "gpu_oom",
        r"(?:CUDA graphs?|graph capture|GPU|VRAM)\b.{0,60}\b(?:out[- ]of[- ]memory|OOM\b(?!.?kill))"
        r"|\b(?:out[- ]of[- ]memory|OOM\b(?!.?kill)).{0,60}\b(?:CUDA graphs?|graph capture|GPU|VRAM)"
        r"|CUDA(?: error)?\b.{0,20}\bout of memory|OutOfMemoryError|cudaErrorMemoryAllocation"
        r"|CUDA_ERROR_OUT_OF_MEMORY|(?:CUDNN|CUBLAS)_STATUS_ALLOC_FAILED"
        r"|CUBLAS_STATUS_NOT_INITIALIZED|HIP out of memory|Failed to (?:allocate"
        r"|cuda)\w* .{0,40}(?:GPU|device) memory|NCCL.{0,60}(?:Failed to CUDA (?:malloc|calloc)"
        r"|out of memory)|Cuda failure 2 'out of memory'|(?:cudaMalloc"
        r"|cuMem(?!Free)\w+)\b.{0,40}(?:out of memory|failed)|Workspace buffer overflow|BufferOverflow"
        r"|allocate (?:a )?(?:workspace|batch_\w+).{0,60}(?:overflow|size)",
        no=r"\bIf you (?:hit|see|encounter|run into)\b",
    ),
    rule(
        "host_oom",
        "host_oom_killed",
        r"oom-kill|oom_kill(?:er)?\b|OOM.?killed|Out of memory: Kill(?:ed)? process"
        r"|Memory cgroup out of memory|oom_reaper|Failed with result 'oom-kill'"
        r"|killed by the OOM killer|invoked oom-killer|exceeds? (?:the )?cgroup memory"
        r"|memory limit.{0,20}(?:reached|exceeded)|evicted.{0,40}memory|systemd-oomd.{0,40}kill",
        no=r"common cause|Run `dmesg|\b(?:cc1plus|cicc|ptxas|nvcc)\b",
    ),
    rule(
        "host_oom",
        "host_memory_exhausted",
        r"Cannot allocate memory|\[Errno 12\]|\bENOMEM\b|std::bad_alloc|\bMemoryError\b"
        r"|can't allocate memory|DefaultCPUAllocator|unable to (?:mmap|allocate) [\d.]+ \w*B"
        r"|Unable to allocate [\d.]+ [KMGT]iB|cudaHost(?:Alloc|Register)\b.{0,60}(?:fail"
        r"|out of memory|error)|pin(?:ned|ning)? (?:host )?memory.{0,40}(?:fail|error)"
        r"|Not enough host memory|host memory.{0,40}(?:not enough|insufficient|exhaust|exceed)",
        no=r"static TLS|/dev/shm|memlock|CUDA out of memory|os\.posix_fallocate",
    ),
    rule(
        "host_oom",
        "host_oom_killed",
        r"Exit code: -9\b|exit code:? -9\)|exitcode:? -?9\b|(?:exit|return) code (?:= )?-9\b|died.{0,40}SIGKILL",
        SYMPTOM,
    ),
    rule(
        "dev_shm_too_small",
        "dev_shm_too_small",
        r"creating shared memory segment|\bNCCL\b.{0,80}(?:No space left|ENOSPC)"
        r"|/dev/shm\S*.{0,120}(?:No space left|ENOSPC|Errno 28|too small|is full|insufficient|not enough)"
        r"|(?:No space left|ENOSPC|Errno 28"
        r"|not enough space|too small|insufficient).{0,120}/dev/shm|insufficient shared memory"
        r"|out of shared memory|unable to (?:write|resize|allocate) (?:to )?(?:file"
        r"|shared memory)\b.{0,40}/?torch_|Bus error.{0,60}(?:shm|shared memory)"
        r"|shm.?size.{0,30}(?:too small|increase)|(?:increase|raise|set)\b.{0,30}(?:shm.?size"
        r"|/dev/shm)",
        no=r"attaching to shared|out of resource",
    ),
)
MODEL_RULES = (
    rule(
        "port_in_use",
        "port_in_use",
        r"address already in use|\bEADDRINUSE\b|\[Errno 98\]|os error 98\b|\bport\b.{0,40}(?:is "
        r"|are )?(?:already )?(?:in use|occupied|being used|used by)|is used by a process already"
        r"|_port at \S+ is not available|port \d+ is not available|Port is already in use|code: -98"
        r"|Could not find (?:a |an )?(?:free|available|open) port|failed to listen on any local"
        r"|cannot bind|could not bind|failed to bind",
    ),
    rule(
        "loopback_via_proxy",
        "loopback_via_proxy",
        r"Proxy keys should use proper URL|(?:Unknown|unsupported) (?:scheme for )?proxy (?:URL|scheme)"
        r"|socksio|Missing dependencies for SOCKS|"
        rf"Invalid port: ':'|res=<Response \[{_BAD_STATUS}\]>"
        rf"|GET {_LOOP}\S*\W{{0,3}}.{{0,40}}\b{_BAD_STATUS}\b"
        rf"|\b{_BAD_STATUS}\b.{{0,80}}(?:for url: )?{_LOOP}[:/]\d*|ProxyError.{{0,200}}{_LOOP}"
        rf"|{_LOOP}\S*.{{0,120}}(?:ProxyError|proxy)|Cannot connect to proxy.{{0,120}}{_LOOP}|(?:http"
        rf"|https|all|no)_proxy\b.{{0,80}}(?:{_LOOP}|warm|set|malformed|invalid|loopback)|(?:squid"
        rf"|X-Squid|privoxy|tinyproxy|Blue ?Coat|zscaler).{{0,80}}"
        rf"|warm.?up.{{0,80}}(?:status(?:_code)?\W{{1,3}}|Response \[|HTTP )\s*{_BAD_STATUS}\b"
        rf"|proxy.{{0,60}}(?:warm.?up|loopback|localhost)",
        no=r"huggingface|hf\.co|/health(?:_generate)? HTTP|unset|INFO: ",
    ),
    rule(
        "model_unavailable",
        "model_gated",
        r"GatedRepoError|gated repo|Access to model .* is restricted|Cannot access gated|(?:401"
        r"|403) (?:Client Error|Unauthorized|Forbidden).{0,200}(?:huggingface|hf\.co|api/models"
        r"|resolve/)|Invalid (?:user )?(?:token|credentials).{0,80}(?:hugging|hf)"
        r"|You must (?:be authenticated|have access)|Invalid username or password|token is (?:invalid"
        r"|expired)|(?:HF_TOKEN|huggingface token).{0,40}(?:invalid|not set|missing|required)",
    ),
    rule(
        "model_unavailable",
        "model_not_found",
        r"RepositoryNotFoundError|RevisionNotFoundError|(?:Remote)?EntryNotFoundError"
        r"|Repository Not Found|is not a (?:local folder and is not a )?valid model identifier"
        r"|not a local folder|404 Client Error.{0,200}(?:huggingface|api/models|resolve/|modelscope)"
        r"|Entry Not Found for url|(?:model|repo)\w* (?:does not exist|not found|was not found)"
        r"|not exists? on (?:ModelScope|the hub)",
    ),
    rule(
        "model_unavailable",
        "hub_unreachable",
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|couldn.?t connect to '?https?://(?:huggingface"
        r"|hf)|(?:NameResolutionError|ConnectionError|ConnectTimeout|ReadTimeout|MaxRetryError"
        r"|Max retries exceeded|ProxyError|SSLError|Temporary failure in name resolution"
        r"|Network is unreachable|ConnectError|Connection (?:refused|reset"
        r"|aborted)).{0,240}(?:huggingface|hf\.co|hf-mirror|modelscope|/api/models|xethub|cdn-lfs)"
        r"|(?:huggingface|hf\.co|modelscope)\S*.{0,200}(?:NameResolution|timed? out|unreachable"
        r"|refused|Temporary failure|Max retries)|outgoing traffic has been disabled|HF_HUB_OFFLINE"
        r"|Cannot find the requested files in the (?:local|disk) cache|429 (?:Client Error"
        r"|Too Many Requests).{0,120}(?:huggingface|hf\.co)",
    ),
    rule(
        "model_unavailable",
        "model_path_missing",
        r"Repo id must (?:be in the form|use alphanumeric)|HFValidationError"
        r"|does not appear to have a file named|Can.?t load (?:the )?(?:config\w*|tokenizer|model"
        r"|feature extractor|processor|image processor)|Cannot find any model weights"
        r"|No (?:model )?(?:weights?|safetensors|checkpoint)\b.{0,20}(?:files? )?found"
        r"|(?:No such file or directory|FileNotFoundError).{0,160}(?:config\.json|tokenizer\w*\.json"
        r"|\.safetensors|model\.safetensors\.index|/models?/\S+)|model (?:path|folder"
        r"|directory)\b.{0,60}(?:not exist|not found|missing|invalid)|(?:missing"
        r"|not found)\W.{0,40}(?:shards?|weight files?)|Couldn.?t (?:find"
        r"|instantiate).{0,60}(?:tokenizer|model)",
        no=r"\.cache/(?:flashinfer|triton)|\.triton|cached_ops|Permission denied",
    ),
    rule(
        "weights_corrupt",
        "weights_corrupt",
        r"SafetensorError|HeaderTooLarge|HeaderTooSmall|MetadataIncompleteBuffer|InvalidHeader\w*"
        r"|deserializing header|incomplete metadata|file not fully covered|invalid load key"
        r"|PytorchStreamReader|failed finding central directory|Consistency check failed"
        r"|git-?lfs(?: pointer)?\b|file is (?:corrupt|truncated)|corrupt\w* (?:weight|safetensors"
        r"|checkpoint|shard|download|file)|(?:safetensors|shard|checkpoint|weights?"
        r"|\.bin)\b.{0,60}(?:corrupt|truncated|incomplete|size mismatch with index|checksum)"
        r"|file should be of size|not enough bytes|unexpected end of (?:file|data)"
        r"|not a (?:valid )?zip archive|magic.*GGUF|TensorOutOfBounds|InvalidOffset",
        no=r"size mismatch for ",
    ),
    rule(
        "disk_full",
        "disk_full",
        r"No space left on device|\[Errno 28\]|os error 28\b|\bENOSPC\b|Disk quota exceeded"
        r"|\[Errno 122\]|os error 122\b|\bEDQUOT\b|disk (?:is )?full|write failed.{0,30}space",
        no=r"/dev/shm|shared memory",
    ),
    rule("disk_full", "disk_full", r"Not enough free disk space", HINT),
    rule(
        "model_unsupported",
        "model_architecture_unsupported",
        r"does not recognize this architecture|are not supported for now"
        r"|Model architectures? .{0,120}(?:not supported|unsupported|not implemented)"
        r"|Unsupported (?:model|architectures?|model type)\b|(?:Unrecognized|Unknown"
        r"|Unsupported) (?:configuration class|model (?:in|type|class|architecture)|processor"
        r"|image processor|feature extractor)|Tokenizer class \S+ (?:does not exist|is not currently)"
        r"|(?:has no|no) (?:SGLang|SGlang|vLLM|Transformers?) implementation|not (?:a )?(?:compatible"
        r"|supported)\b.{0,30}\b(?:model|architecture) (?:type|class)|model type [`'\"]\w+"
        r"|KeyError: '(?:[a-z][\w-]*\d[\w-]*|[a-z]+_[\w]+)'.{0,40}(?:config|CONFIG_MAPPING)"
        r"|rope_scaling\b.{0,80}(?:must|should|unknown|invalid|unsupport)|Unknown RoPE scaling"
        r"|(?:unsupported|unknown) activation",
        no=r"Unsupported architecture$|\.cuh|no kernel",
    ),
    rule(
        "model_unsupported",
        "trust_remote_code_required",
        r"trust_remote_code|trust-remote-code|requires you to execute|contains custom code"
        r"|custom code which must be executed|transformers_modules",
    ),
    rule(
        "model_unsupported",
        "quant_layout_mismatch",
        r"size mismatch for |copying a param with shape|(?:quantization|quant)\w* (?:method|config"
        r"|scheme|format)\b.{0,80}(?:does not match|mismatch|unknown|not supported|invalid"
        r"|unsupported|is not found|not in)|Unknown quantization|Invalid quantization"
        r"|Unsupported (?:quant|fp8|ModelOpt)\w*|Cannot find (?:the )?(?:quant\w* )?config file"
        r"|is not divisible by (?:weight |the )?(?:quantization|block|group|min_thread)"
        r"|weight\w* input_size_per_partition|not aligned with the quantized"
        r"|output_size\S* .{0,40}not divisible|Error\(s\) in loading state_dict"
        r"|Missing key\(s\) in state_dict|Unexpected key\(s\)|(?:KeyError|ValueError"
        r"|AttributeError): .{0,10}(?:model|lm_head|layers|transformer|language_model)\.[\w.]+"
        r"|Following weights were not initialized|Attempted to load weight|loaded_weight\.(?:shape"
        r"|size)|parameter.{0,40}(?:shape|size).{0,40}(?:mismatch|does not match)",
        no=r"current GPU|Min(?:imum)? capability|for the current|\bSM ?\d|sm_\d|this GPU",
    ),
    rule(
        "model_unsupported",
        "model_architecture_unsupported",
        r"^(?:KeyError|AssertionError|RuntimeError: The size of tensor|RuntimeError: shape)",
        frame=r"(?:models/\w+\.py|loader\.py):load_weights|weight_loader"
        r"|weight_utils\.py:default_weight_loader",
    ),
)
RUN_RULES = (
    rule(
        "cuda_kernel_fault",
        "cuda_kernel_fault",
        r"illegal memory access|illegal instruction|misaligned address|device-side assert"
        r"|unspecified launch failure|invalid program counter|hardware stack error"
        r"|CUDA error: an illegal|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED"
        r"|cudaError(?:IllegalAddress|LaunchFailure|MisalignedAddress|Assert|IllegalInstruction)"
        r"|Segmentation fault|SIGSEGV|Warp (?:Illegal|Out-of-range|Misaligned)"
        r"|\b(?:CUDA\b.{0,20}\b(?:error|failure|status)|cudaError(?:_t)?|CUresult|tensor map)\b\W{0,3}(?:code )?"
        r"7(?:00|1[4-9])\b",  # the same by number, as drivers and libraries report it
        no=r"Device-side assertions were explicitly omitted|TORCH_USE_CUDA_DSA",
    ),
    rule(
        "output_wrong",
        "output_nan",
        r"NaN in the (?:logits|prob)|NaNs? (?:detected|found) in"
        r"|probability tensor contains (?:either )?|logits? (?:contain|are|is|all"
        r"|full of)\b.{0,20}\b(?:NaN|inf)|(?:all|only)[- ]NaN|Detected errors during sampling",
    ),
    rule(
        "engine_stalled",
        "watchdog_timeout",
        r"watchdog timeout|Watchdog caught collective|self\.watchdog_timeout|heartbeat.{0,40}(?:lost"
        r"|stopped|missing|not moving)|\bHeartbeatMonitor\b",
        SYMPTOM,
    ),
    rule(
        "engine_stalled",
        "warmup_failed",
        r"Initialization failed\. warmup error|warm.?up (?:request )?(?:failed|timed out|error|never)"
        r"|Read timed out.{0,60}(?:warm|/generate|health)|(?:stuck|hang\w*|hung) (?:at|in|during"
        r"|on) (?:the )?warm",
        SYMPTOM,
    ),
    rule(
        "engine_stalled",
        "nccl_init_hang",
        r"attaching to shared memory segment|DistBackendError|NCCL error"
        r"|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError|NCCL WARN|DistStoreError"
        r"|DistNetworkError|Timed out after \d+ seconds waiting for (?:clients|other)|(?:store"
        r"|rendezvous|barrier|all_?reduce|broadcast|collective"
        r"|init_process_group)\b.{0,60}(?:time\w* ?out|timed out|hang\w*|stuck)|Gloo .*(?:timeout"
        r"|timed out|failed)|wait timeout after",
        SYMPTOM,
        no=r"Address already in use|EADDRINUSE|code: -98|unhandled system error|ncclSystemError|out of memory",
    ),
    rule(
        "engine_stalled",
        "peer_rank_died",
        r"Connection closed by peer|connection reset by peer|peer (?:rank )?(?:died|is dead|closed)"
        r"|RPC call .*timed out|sample_tokens timed out|TCPStore.{0,60}(?:closed|reset|Broken pipe)",
        SYMPTOM,
    ),
)
