"""Rules for what the training program and its libraries say. Specific before general: the first match decides a line."""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Rule, text_rule

_CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_CUDA_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_DIST = "https://docs.pytorch.org/docs/stable/distributed.html"
_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_PYTHON = "https://docs.python.org/3/library/exceptions.html"
_AMP = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_CUDNN = "https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html"
_CUBLAS = "https://docs.nvidia.com/cuda/cublas/index.html"
_HSA = "https://github.com/ROCm/ROCR-Runtime/blob/rocm-6.2.0/src/inc/hsa.h"
_SIGNALS = "https://man7.org/linux/man-pages/man7/signal.7.html"

ACCELERATORS: tuple[Rule, ...] = (
    # --- accelerators: whose memory, whose kernel ---------------------------------------------------------------------
    text_rule(
        "cuda.device-assert",
        r"device-side assert triggered|[Aa]ssertion `[^`']+['`] failed|\bsrcIndex < srcSelectDimSize|cudaErrorAssert",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.9,
        Blames.CODE,
        "a check inside a kernel failed, mostly an index outside a table: data or vocabulary, never the GPU",
        _CUDA,
    ),
    text_rule(
        "cuda.fork-said",
        r"Cannot re-initialize CUDA in forked subprocess",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.85,
        Blames.CODE,
        "the program forks after it has started CUDA: it must spawn its processes",
        _CUDA_NOTES,
    ),
    text_rule(
        "cuda.fork",
        r"Cuda failure '?3? ?'?initialization error|CUDA error: initialization error",
        Verdict.PROCESS_FAULT,
        Strength.CAUSE,
        0.65,
        Blames.CODE,
        "CUDA was used in a process that was forked after CUDA had been started",
        _CUDA_NOTES,
    ),
    text_rule(
        "cuda.no-kernel-image",
        r"no kernel image is available|CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|forward compatibility was attempted|[Uu]nsupported gpu architecture|PTX was compiled with an unsupported toolchain"
        r"|not compatible with the current PyTorch installation|not supported in the installed CUDA driver|device kernel image is invalid",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.85,
        Blames.CODE,
        "the program was built for another GPU or driver",
        _CUDA,
    ),
    text_rule(
        "cuda.invalid-device",
        r"invalid device ordinal|CUDA call failed lazily at initialization|cudaErrorInvalidDevice\b",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.8,
        Blames.CODE,
        "the program asks for a GPU that this process does not have: ranks and devices are mapped wrongly",
        _CUDA,
    ),
    text_rule(
        "hpl.cuda-error",
        r"HPL ERROR.{0,40}CUDA",
        Verdict.NODE_FAULT,
        Strength.CAUSE,
        0.65,
        Blames.NODE,
        "a program that is known to be correct failed here: the node, not the code",
        "https://github.com/NVIDIA/nccl/issues/1562",
    ),
    text_rule(
        "cuda.illegal-access",
        r"illegal memory access|misaligned address|IllegalAddress|ILLEGAL_ADDRESS|MISALIGNED_ADDRESS",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.55,
        Blames.RANK,
        "a kernel touched memory it does not own: a bug in it, or data that was damaged on the way",
        _CUDA,
    ),
    text_rule(
        "cuda.launch-failure",
        r"illegal instruction was encountered|an unknown error occurred.*CUDA",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.5,
        Blames.RANK,
        "a kernel died; a bug in it and a bad GPU look alike",
        _CUDA,
    ),
    text_rule(
        "gpu.oom-bare",
        r"(?:CUDA|cuda|HIP|hip|NPU|NCCL)\w*(?: driver| runtime)?(?: [Ee]rror| failed)?: out of memory",
        Verdict.OOM_GPU,
        Strength.CAUSE,
        0.6,
        Blames.GPU,
        "the driver, not the allocator, had no memory left; before any model is built it is a sick or occupied GPU",
        _CUDA_NOTES,
    ),
    text_rule(
        "triton.out-of-resources",
        r"out of resources?: (?:shared memory|registers|threads)|triton\.compiler\.errors|torch\._dynamo\.exc\.|XlaRuntimeError: INVALID_ARGUMENT",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.8,
        Blames.CODE,
        "the kernel or program as written cannot be built for this GPU, on any node",
        "https://github.com/triton-lang/triton/blob/main/python/triton/runtime/errors.py",
    ),
    text_rule(
        "cuda.no-gpus-visible",
        r"No CUDA GPUs are available|Found no NVIDIA driver|Torch not compiled with CUDA enabled",
        Verdict.USER_ERROR,
        Strength.SYMPTOM,
        0.55,
        Blames.CODE,
        "this process sees no GPU: CUDA_VISIBLE_DEVICES, the request to the scheduler, or the build",
        _CUDA_NOTES,
    ),
    text_rule(
        "gpu.oom-other-text",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|RESOURCE_EXHAUSTED: Out of memory|Cuda failure '?2? ?'?out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|hipErrorOutOfMemory|Failed to CUDA (?:calloc|malloc)",
        Verdict.OOM_GPU,
        Strength.CAUSE,
        0.65,
        Blames.GPU,
        "the GPU had no memory left; without sizes it may also be another process on it",
        _CUDA_NOTES,
    ),
    text_rule(
        "cudnn.transient",
        r"CUDNN_STATUS_(?:EXECUTION_FAILED|MAPPING_ERROR)",
        Verdict.TRANSIENT,
        Strength.SYMPTOM,
        0.45,
        Blames.RANK,
        "a library kernel failed once; run again before suspecting anybody",
        _CUDNN,
    ),
    text_rule(
        "cudnn.unclear",
        r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|ALLOC_FAILED)|CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
        Verdict.OOM_GPU,
        Strength.SYMPTOM,
        0.4,
        Blames.RANK,
        "the library could not start: mostly memory that ran out, sometimes the driver or the program",
        _CUBLAS,
    ),
    text_rule(
        "cudnn.bad-call",
        r"CUDNN_STATUS_(?:BAD_PARAM|NOT_SUPPORTED|ARCH_MISMATCH|VERSION_MISMATCH)|CUBLAS_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED)",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.65,
        Blames.CODE,
        "the library does not do what was asked for, on any node",
        _CUDNN,
    ),
    text_rule(
        "hsa.exception",
        r"HSA_STATUS_ERROR_EXCEPTION|Memory access fault by GPU node|hipErrorIllegalAddress",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.5,
        Blames.RANK,
        "a kernel on an AMD GPU died",
        _HSA,
    ),
    text_rule(
        "hsa.aperture",
        r"HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.4,
        Blames.RANK,
        "an address outside the GPU's memory: from many ranks it is the program, from one always the same it is the board",
        _HSA,
    ),
)
"""Whose memory, whose kernel; tried before the rules about communication, which often wraps their messages."""

PROGRAM: tuple[Rule, ...] = (
    # --- numbers ----------------------------------------------------------------------------------------------------
    text_rule(
        "numerical.local-nan",
        r"found NaN in local|[Uu]nexpected result (?:nan|inf) on rank",
        Verdict.NUMERICAL,
        Strength.CAUSE,
        0.55,
        Blames.RANK,
        "one rank's numbers went wrong before they were shared: bad data, an unlucky step or a flaky GPU; repeats tell",
        "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/rerun_state_machine.py",
    ),
    text_rule(
        "numerical.nan",
        r"[Ff]ound (?:NaN|[Nn]an|Inf)|(?:NaN|nan|Inf)s?(?: or \w+)?(?: detected| encountered| found in| in loss| in grad| in local)"
        r"|returned nan values|is non-finite|probability tensor contains|Input contains (?:NaN|infinity)|became (?:NaN|nan)\b|loss scale (?:is )?already at minimum|[Mm]inimum loss scale reached|loss scale is (?:0\b|zero|too small)|[Ll]oss is (?:NaN|nan|inf)"
        r"|number of nan iterations: +[1-9]|(?:loss|norm)['\"]?(?:: |=)(?:nan|NaN|NAN|inf)\b|(?:Loss|LOSS|Norm)(?:: |=| = )(?:nan|NaN)\b|[Nn]on-finite (?:loss|grad)|loss scale to (?:0\.0|\d(?:\.\d+)?e-)|loss exploded|exploding gradient"
        r"|[Ll]oss spike|[Ll]oss diverged|Unexpected result (?:nan|inf)",
        Verdict.NUMERICAL,
        Strength.CAUSE,
        0.8,
        Blames.RANK,
        "the training itself went wrong: go back before it, and look at the same rank if it is always the same",
        _AMP,
    ),
    text_rule(
        "numerical.metric-nan",
        r"loss(?:: | : |:|=| = |': |\": | )(?:nan|NaN|NAN)\b(?! check)|norm(?:: | : |:|=| = |': |\": | )(?:nan|NaN|NAN)\b(?! check)",
        Verdict.NUMERICAL,
        Strength.CAUSE,
        0.75,
        Blames.NOBODY,
        "a loss or a norm is no number any more",
        _AMP,
    ),
    # --- the user's program -----------------------------------------------------------------------------------------
    text_rule(
        "user.ddp-contract",
        r"Expected to have finished reduction in the prior iteration|mark a variable ready only once|parameters? that w(?:as|ere) not used in producing loss",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.9,
        Blames.CODE,
        "the ranks do not use the same parameters in every step, which the wrapper requires",
        _DDP,
    ),
    text_rule(
        "user.not-initialised",
        r"Default process group has not been initialized|environment variable \w+ expected, but not set|Process group .{0,30}already initialized"
        r"|trying to initialize the default process group twice",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.9,
        Blames.CODE,
        "the program was started without its launcher, or starts communication twice",
        _DIST,
    ),
    text_rule(
        "user.shapes",
        r"size mismatch for|[Ss]izes of tensors must match|shapes cannot be multiplied|size of tensor \w+ \(\d+\) must match|shape '\[.*\]' is invalid"
        r"|Expected all tensors to be on the same device|expected scalar type|Error\(s\) in loading state_dict|current world size is|world size of \d+ but|Missing key\(s\) in state_dict|Unexpected key\(s\) in state_dict"
        r"|does not require grad|modified by an inplace operation|must be divisible|not divisible by|(?:index|Target) \S+ is out of bounds|index out of range in self"
        r"|backward through the graph a second time",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.85,
        Blames.CODE,
        "tensors do not fit the model: a bug, or a checkpoint of another model",
        _PYTHON,
    ),
    text_rule(
        "user.library",
        r"undefined symbol|cannot open shared object file|version `[^']+' not found|(?:ModuleNotFound|Import)Error|No module named|cannot import name",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.85,
        Blames.CODE,
        "the program's environment is incomplete or inconsistent",
        _PYTHON,
    ),
    text_rule(
        "user.usage",
        r"usage: \S+ \[-h\]|error: (?:unrecognized arguments|the following arguments are required|argument )|Errno 13\]|Errno 2\]"
        r"|[Tt]oo many open files|received 0 items of ancdata|Errno 24\]|can't start new thread|FileNotFoundError",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.7,
        Blames.CODE,
        "what was asked for does not exist, is not allowed or exceeds a limit of the account",
        _PYTHON,
    ),
    # --- crashes of processes ---------------------------------------------------------------------------------------
    text_rule(
        "process.crash-in-nccl",
        r"\bncclGroupEnd\(\)|\bncclCommInit\w*\(\)",
        Verdict.NODE_FAULT,
        Strength.SYMPTOM,
        0.45,
        Blames.NODE,
        "a process crashed inside the set-up of communication: seen with a dead fabric manager, also with mixed libraries",
        "https://github.com/NVIDIA/nccl/issues/1562",
    ),
    text_rule(
        "process.native-exception",
        r"terminate called after throwing an instance of 'std::(?:out_of_range|logic_error|length_error|domain_error|invalid_argument|bad_\w+_call|bad_optional_access|bad_variant_access|bad_cast|future_error|regex_error)",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.45,
        Blames.RANK,
        "native code raised an exception that only a bug in it, or in how it was called, raises",
        _SIGNALS,
    ),
    text_rule(
        "process.segfault",
        r"[Ss]egmentation fault|\bSIGSEGV\b|double free or corruption|malloc\(\): corrupted|free\(\): invalid|stack smashing detected|corrupted size vs",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.4,
        Blames.RANK,
        "native code of the process crashed",
        _SIGNALS,
        ("process.crash-in-nccl",),
    ),
    text_rule(
        "process.illegal-instruction",
        r"[Ii]llegal instruction\b|\bSIGILL\b",
        Verdict.USER_ERROR,
        Strength.SYMPTOM,
        0.6,
        Blames.CODE,
        "the program was built for another processor",
        _SIGNALS,
    ),
    text_rule(
        "process.bus-error",
        r"\bBus error\b|\bSIGBUS\b",
        Verdict.OOM_HOST,
        Strength.SYMPTOM,
        0.35,
        Blames.RANK,
        "mostly /dev/shm is full; else a mapped file went away, or memory is bad",
        _SIGNALS,
    ),
    text_rule(
        "python.traceback",
        r"Traceback \(most recent call last\)|ChildFailedError",
        Verdict.UNKNOWN,
        Strength.ECHO,
        0.1,
        Blames.NOBODY,
        "where the exception below it was raised",
        _PYTHON,
    ),
)
