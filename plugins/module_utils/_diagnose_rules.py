# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Rules: what a line, or an exception with its frames, is a sign of; those on devices and units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ansible_collections.gpufleet.sglang.plugins.module_utils._diagnose_log import Event

CAUSE = 3  # says why
HINT = 2  # a warning that may be why: counts when nothing says more
SYMPTOM = 1  # fits several causes: counts when there is nothing else at all


# What a mere warning may be the cause of; any other code needs more than a warning.
WARNINGS = frozenset(
    (
        *("driver_too_old", "driver_unavailable", "gpu_access_denied", "nvcc_too_old_for_gpu", "arch_list_wrong"),
        *("no_kernel_image", "disk_full", "state_degraded", "model_unavailable", "unit_misconfigured"),
    )
)


# It found another way: what a server says that goes on.
FALLBACK = re.compile(
    r"\bfall(?:ing|s)? ?back\b|\bfallback\b|\broll(?:ing|s)? back\b|\bdisabl(?:ed|ing)\b|\bskip(?:ping|ped|s)?\b"
    r"|\b(?:keep|retain|continu)ing\b|\boverrid(?:den|ing)\b|\b(?:re-?download|auto-?repair|removed|removing|created"
    r"|trying port|will download)\b|\beagerly\b|\brefusing \S+ to avoid|^Use \S+ as the |^Setting "
    r"|\bis not available\.$|\bit is recommended to\b|\bunavailable\b.{0,60}\b(?:requires|because)\b"
    r"|\busing (?:the )?[\w-]+ .{0,20}\b(?:path|kernel)\b",
    re.IGNORECASE,
)
# It did something about it, which may not have been enough: no reason when there is an exception that nothing explains.
COPED = re.compile(
    r"\binstead\b(?! of)|\bsanitized\b|\bTruncated\b|\bwaiting for \S+ seconds\b|\bis capped to\b|\bignored\b"
    r"|\bENABLED\b|\bloaded as generic\b|\bis still\b|\bgoverns\b|^\[unified-memory-pool\]"
    r"|\bCould not (?:create|infer)\b|\bNot enough free disk space\b",
    re.IGNORECASE,
)

# Python's way to ask whether something is installed: what came while that was handled says more.
OPTIONAL = re.compile(r"(?:\|\s*)*(?:ModuleNotFoundError|ImportError)\b")


@dataclass(frozen=True)
class Rule:
    """A pattern of one code. not_: leaves the rule out; frame: must match one of the exception's frames."""

    code: str
    detail: str
    pattern: re.Pattern[str]
    strength: int = CAUSE
    not_: re.Pattern[str] | None = None
    frame: re.Pattern[str] | None = None
    check: Callable[[re.Match[str]], bool] | None = None


@dataclass(frozen=True)
class Sign:
    """What a rule, or a fact of the host, says about the cause."""

    code: str
    detail: str
    strength: int
    evidence: str
    line: int = 0  # of the log; 0 = a fact of the host
    wrapped: bool = False
    fact: bool = False
    chatter: bool = False  # a line of a server that may have gone on: a hint, a symptom, or one that says it coped


def rule(
    code: str,
    detail: str,
    pattern: str,
    strength: int = CAUSE,
    *,
    no: str = "",
    frame: str = "",
    check: Callable[[re.Match[str]], bool] | None = None,
) -> Rule:
    """Build a rule; patterns ignore case unless they begin with (?-i:...)."""
    return Rule(
        code,
        detail,
        re.compile(pattern, re.IGNORECASE),
        strength,
        re.compile(no, re.IGNORECASE) if no else None,
        re.compile(frame, re.IGNORECASE) if frame else None,
        check,
    )


def match(rules: Sequence[Rule], events: Iterable[Event]) -> list[Sign]:
    """Return what the rules say about the events."""
    found = []
    for event in events:
        for item in rules:
            hit = item.pattern.search(event.text)
            if not hit or (item.not_ and item.not_.search(event.text)):
                continue
            if item.frame and not item.frame.search(event.where):
                continue
            if item.check and not item.check(hit):
                continue
            plain = event.kind in ("log", "warning")
            if plain and item.strength == CAUSE and FALLBACK.search(event.text) and "CUDA error" not in event.text:
                continue
            strength, coped = item.strength, plain and bool(COPED.search(event.text))
            if event.handled and OPTIONAL.match(event.text):
                strength = HINT
            if event.kind == "warning" and strength == CAUSE:
                if item.code not in WARNINGS:
                    continue
                strength = HINT
            chatter = coped or (plain and strength < CAUSE and item.code not in WARNINGS)
            chatter = chatter or (plain and item.code == "backend_unsupported_on_gpu")  # how backends are chosen
            found.append(Sign(item.code, item.detail, strength, event.text, event.line, event.wrapped, chatter=chatter))
    return found


# Xid numbers that mean the hardware (or its firmware), as NVIDIA's catalogue and the taxonomy have them.
HARDWARE_XID = frozenset(
    (
        *(38, 46, 48, 54, 60, 61, 62, 63, 64, 65, 74, 79, 80, 81, 82, 92, 94, 95, 110, 119, 120, 121, 136, 140, 143),
        *range(144, 151),
        *(154, 155, 156, 158, 160, 171, 172),
    )
)
APPLICATION_XID = frozenset((6, 7, 8, 11, 12, 13, 31, 32, 41, 43, 68, 69))  # 45 follows from another one
_XID = re.compile(
    r"\bXids?\b\s*(?:\(PCI:[0-9a-fA-F:.]+\))?\s*:?\s*(\d+(?:\s*(?:/|,|and)\s*\d+\b(?![-.:\w]))*)", re.IGNORECASE
)


def xids(text: str) -> list[int]:
    """Return the Xid numbers a line names."""
    found: list[int] = []
    for hit in _XID.finditer(text):
        # the kernel's own line goes on with ", pid=..." or a code; a report may list several numbers
        words = hit.group(1) if "PCI" not in hit.group(0) else hit.group(1).split(",")[0]
        found += [int(word) for word in re.findall(r"\d+", words)]
    return found


def _hardware_xid(hit: re.Match[str]) -> bool:
    return any(number in HARDWARE_XID for number in xids(hit.string))


def _application_xid(hit: re.Match[str]) -> bool:
    return any(number in APPLICATION_XID for number in xids(hit.string))


# Where compiled kernels are kept; wider words for it would also fit packages.
KERNEL_CACHE = r"(?:\.cache|cached_ops|torch_extensions|\.triton|torchinductor)"
_NODE = r"/dev/nvidia(?:\d+|ctl|-uvm(?:-tools)?|-modeset|-caps\S*)?"
_DENIED = (
    r"(?:permission denied|operation not permitted|no such file|not permitted|missing"
    r"|does not exist|not (?:found|present|visible|accessible|available))"
)

DEVICE_RULES = (
    rule("gpu_hardware_fault", "gpu_hardware_fault", r"\bXid", check=_hardware_xid),
    rule("cuda_kernel_fault", "cuda_kernel_fault", r"\bXid", check=_application_xid),
    rule(
        "gpu_hardware_fault",
        "gpu_hardware_fault",
        r"uncorrectable (?:volatile )?(?:ECC|NVLink)|uncorrectable ECC error|fallen off the bus|\bGPU is lost"
        r"|ECCUncorrectable|NvlinkUncorrectable|GPU recovery action changed|GPU requires (?:a )?reset"
        r"|_issueRpcAndWait|rpcSendMessage failed|GspRmFree failed|IN_FULLCHIP_RESET|GPU_ATTACHED_SANITY_CHECK failed"
        r"|needs? (?:to be )?reset|RmInitAdapter failed|GSP task watchdog timeout|_kgspRpc|GSP (?:RPC"
        r"|firmware) (?:timeout"
        r"|crash)|Timeout (?:after|waiting).*GSP|PMU has halted|row.?remap\w* (?:fail|pending)|NVLink: .*fatal"
        r"|pcieport .*AER: .*(?:uncorrect|fatal)|contained error|Double Bit|\bDBE\b"
        r"|Unable to determine the device handle",
        no=r"correctable.* 0$",
    ),
    rule(
        "gpu_hardware_fault",
        "gpu_wedged",
        r"INFO: task (?:nvidia-smi|nv\w*|python\S*|sglang\S*|vllm\S*)\S* blocked for more than"
        r"|nvidia-smi\b.{0,60}\b(?:hangs?|hung|stuck|did not (?:answer|finish|return)|never returns|times? out)"
        r"|nvidia-smi\b.{0,80}\bERR!|\bin D state\b.{0,60}nvidia|nvidia.{0,60}\bD state",
    ),
    rule("gpu_hardware_fault", "gpu_wedged", r"uvm_spin_loop|uvm_tracker_wait|\[nvidia(?:_uvm|_drm)?\]$|\bERR!"),
    rule("gpu_hardware_fault", "gpu_wedged", r"INFO: task \S+ blocked for more than", HINT),
    rule(
        "driver_library_mismatch",
        "driver_library_mismatch",
        r"Driver/library version mismatch|\bError 803\b|unsupported display driver ?/ ?cuda driver combination"
        r"|LIB_RM_VERSION_MISMATCH|API mismatch: the (?:client|NVIDIA)|SystemDriverMismatch|SYSTEM_DRIVER_MISMATCH"
        r"|kernel module.{0,60}(?:but|does not match).{0,80}(?:librar|client|user)",
    ),
    rule(
        "driver_unavailable",
        "driver_library_missing",
        r"lib(?:cuda|nvidia-ml)\.so(?:\.\d+)?\b.{0,40}(?:cannot open|not found|No such file|missing)"
        r"|NVML Shared Library Not Found|load library failed: libnvidia-ml|libcuda\.so(?:\.1)? cannot found"
        r"|(?:could not|cannot|can't|failed to|unable to) (?:find|load|locate"
        r"|dlopen)\b.{0,30}lib(?:cuda|nvidia-ml)\.so",
    ),
    rule(
        "driver_unavailable",
        "driver_not_loaded",
        r"couldn.?t communicate with the NVIDIA driver|NVIDIA-SMI has failed|Found no NVIDIA driver"
        r"|nvml error: driver not loaded|NVML_ERROR_DRIVER_NOT_LOADED|Driver Not Loaded"
        r"|NVIDIA driver is not (?:loaded|installed)"
        r"|modprobe: .*nvidia|nvidia: module .*not found|Module nvidia not found|no NVIDIA (?:GPU"
        r"|kernel) .*(?:module|driver)"
        r"|dkms\b.*nvidia.*(?:fail|error)",
    ),
    rule(
        "driver_unavailable",
        "gpu_not_exposed",
        r"no CUDA-capable device|No CUDA GPUs are available|Found no (?:CUDA|NVIDIA) (?:GPU|device)"
        r"|no usable GPU found"
        r"|No NVIDIA (?:GPU|device)s? (?:found|detected|available)|No devices were found|Failed to infer device type"
        r"|No accelerator \(CUDA|cudaErrorNoDevice|could not select device driver \"?\"? ?with capabilities"
        r"|no (?:CUDA )?(?:GPU|device)s? (?:is |are |was |were )?(?:detected|visible)"
        r"|\bunknown or invalid runtime name: nvidia",
        no=r"Expected variant",
    ),
    rule(
        "driver_unavailable",
        "fabric_manager_not_running",
        r"\bError 802\b|system not yet initialized|SystemNotReady|SYSTEM_NOT_READY"
        r"|fabric ?manager.{0,60}(?:not running"
        r"|fail|inactive|not (?:been )?(?:started|active)|mismatch|version)|Fabric state.{0,20}(?:in progress|never)",
    ),
    rule(
        "driver_unavailable",
        "gpu_init_slow",
        r"GPU discovery.{0,30}tim\w+ ?out|timed? ?out.{0,40}(?:initiali[sz]ing"
        r"|discover\w+) (?:the )?GPU",
    ),
    rule(
        "gpu_access_denied",
        "device_cgroup_denied",
        r"Failed to initialize NVML: (?:Unknown Error|Insufficient Permissions|.*permission)"
        r"|NVML: Insufficient Permissions"
        r"|NVML_ERROR_NO_PERMISSION|BPF_CGROUP_DEVICE|cgroup.{0,40}device.{0,40}(?:denied|not permitted)"
        r"|nvidia-container-cli: .*(?:permission denied|not permitted)",
    ),
    rule(
        "gpu_access_denied",
        "uvm_device_missing",
        rf"CUDA:? (?:error: )?unknown error|\bcuda\w*\b.{{0,30}}\berror 999|cudaErrorUnknown\b|CUDA_ERROR_UNKNOWN"
        rf"|cuInit\D{{0,20}}999|{_NODE}\b.{{0,40}}{_DENIED}"
        rf"|{_DENIED}.{{0,30}}{_NODE}|nvidia.?uvm.{{0,30}}(?:missing|not loaded|not found|major)"
        r"|CUDA_ERROR_NOT_PERMITTED"
        r"|cudaErrorNotPermitted",
    ),
    rule(  # what the driver says for want of anything better: a plainer word beside it is the cause
        "gpu_access_denied",
        "device_cgroup_denied",
        r"CUDA_ERROR_OPERATING_SYSTEM|\bError 304\b|OS call failed or operation not supported on this OS",
        HINT,
    ),
    rule(
        "gpu_access_denied",
        "selinux_denied",
        r"(?:avc: +denied|type=AVC).*(?:nvidia|xserver_misc_device|/dev/dri)|apparmor=.DENIED.*nvidia",
    ),
    rule(
        "driver_too_old",
        "driver_too_old",
        r"driver on your system is too old|CUDA driver version is insufficient"
        r"|Please update your GPU driver|unsatisfied condition: (?:cuda|driver|brand)"
        r"|InsufficientDriver|driver is (?:too old|outdated)|requires (?:a )?(?:newer"
        r"|minimum) (?:NVIDIA )?driver|minimum (?:required )?driver version|STUB_LIBRARY"
        r"|CUDA driver is a stub",
    ),
    rule(
        "driver_too_old",
        "driver_too_old",
        r"undefined symbol:? \W?(?-i:cu[A-Z]\w+)",
        no=rf"{KERNEL_CACHE}\S*\.so",  # built here, and not to be loaded: that is the cache's fault
    ),
    rule(
        "driver_too_old",
        "driver_too_old_for_ptx",
        r"PTX was compiled with an unsupported toolchain|UnsupportedPtxVersion"
        r"|UNSUPPORTED_PTX_VERSION|Unsupported PTX version|PTX JIT compil\w+ .*(?:not found"
        r"|unsupported)",
    ),
    rule(
        "driver_too_old",
        "forward_compat_unsupported",
        r"\bError 804\b|forward compatibility was attempted|CompatNotSupportedOnDevice"
        r"|COMPAT_NOT_SUPPORTED",
    ),
    rule("wrong_device", "visible_devices_unparsable", r"invalid literal for int\(\).{0,30}['\"](?:GPU|MIG)-"),
    rule(
        "wrong_device",
        "gpu_selection_wrong",
        r"invalid device ordinal|InvalidDevice\b|\bError 101\b.*device"
        r"|device >= 0 && device < num_gpus|device=\d+, num_gpus=\d+|Invalid device id"
        r"|CUDA_VISIBLE_DEVICES\b.{0,40}\b(?:invalid|out of range|not (?:a )?valid)|(?:GPU"
        r"|device) (?:index|id) \d+ (?:is )?(?:out of range|does not exist|not found)",
    ),
    rule(
        "wrong_device",
        "silent_cpu_fallback",
        r"(?:falling|fell|fall) back to (?:the )?CPU\b|CUDA is not available, using CPU"
        r"|No GPU found, using CPU|running on (?:the )?CPU instead",
        HINT,
        no=r"\bop(?:erator)?\b|pin",
    ),
)
UNIT_RULES = (
    rule(
        "unit_misconfigured",
        "systemd_start_timeout",
        r"(?:start|start-pre|start-post|start) operation timed out|Failed with result 'timeout'"
        r"|Result=timeout|\bresult: timeout\b|exceeded (?:its )?TimeoutStartSec",
    ),
    rule("unit_misconfigured", "systemd_watchdog", r"Failed with result 'watchdog'|service: Watchdog timeout \(limit"),
    rule("unit_misconfigured", "ulimit_nofile", r"Too many open files|\bEMFILE\b|\[Errno 24\]|os error 24\b"),
    rule(
        "unit_misconfigured",
        "ulimit_tasks",
        r"can't start new thread|pthread_create failed|unable to create (?:new )?(?:native )?thread"
        r"|Resource temporarily unavailable.{0,60}(?:fork|thread|process)|(?:fork"
        r"|clone)\w*: .*Resource temporarily unavailable|libgomp: Thread creation failed",
    ),
    rule(
        "unit_misconfigured",
        "unit_exec_failed",
        r"Failed at step \w+ spawning|status=(?:20\d|21\d|22\d|23\d|24\d)/[A-Z_]+"
        r"|Failed to (?:load environment files|determine user credentials|set up mount namespac\w+"
        r"|locate executable|execute \S+)|(?:bad|unknown|invalid) (?:unit file )?setting"
        r"|Unknown (?:lvalue|key name)",
    ),
    rule(
        "unit_misconfigured",
        "wrong_flag",
        r": error: (?:argument|unrecognized arguments|the following arguments are required"
        r"|ambiguous option)|^error: (?:unexpected|unrecognized) argument|No such option:",
    ),
    rule(
        "unit_misconfigured",
        "unit_env_missing",
        r"KeyError: '(?:USER|LOGNAME|HOME|PATH|[A-Z]{2,}_[A-Z_]+)'"
        r"|environment variable '?\"?[A-Z_]{3,}'?\"? (?:is )?(?:not set|missing|required)"
        r"|\b[A-Z]{2,}_[A-Z_]+ is not set\b",
        no=r"CUDA_HOME|CUDA_PATH|CUDA_ROOT|CUDA_ARCH|arch_list|HF_TOKEN|defaulting to|using default|will be",
    ),
    rule("unit_misconfigured", "unit_env_missing", r"(?:^|[\s'\"=])\./\.(?:cache|config|local|llamafile|triton|nv)\b"),
)
