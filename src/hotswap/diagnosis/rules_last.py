"""Families of causes, for what no special rule knows: error names of whole libraries, error numbers of the system, the words with
which libraries say that they were called wrongly. They are tried after all special rules."""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Rule, text_rule

_CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_CUBLAS = "https://docs.nvidia.com/cuda/cublas/index.html"
_SOLVER = "https://docs.nvidia.com/cuda/cusolver/index.html"
_XLA = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
_TPU = "https://cloud.google.com/tpu/docs/troubleshooting/trouble-tf"
_NPU = "https://github.com/hiyouga/LlamaFactory/issues/3839"
_TORCH = "https://docs.pytorch.org/docs/stable/tensors.html"
_PARALLEL = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
_LOADER = "https://docs.pytorch.org/docs/stable/data.html"
_ERRNO = "https://man7.org/linux/man-pages/man3/errno.3.html"
_LUSTRE = "https://doc.lustre.org/lustre_manual.xhtml"
_GRPC = "https://grpc.io/docs/guides/status-codes/"
_S3 = "https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html"
_HTTP = "https://developer.mozilla.org/en-US/docs/Web/HTTP/Status"
_OFI = "https://github.com/aws/aws-ofi-nccl/blob/master/DIAGNOSTICS.md"
_UCX = "https://openucx.readthedocs.io/en/master/faq.html"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_NATIVE = "https://abseil.io/docs/cpp/guides/logging"
_SHELL = "https://www.gnu.org/software/bash/manual/bash.html#Exit-Status"
_BAD_ALLOC = "https://en.cppreference.com/w/cpp/memory/new/bad_alloc"

LAST: tuple[Rule, ...] = (
    # --- accelerators -----------------------------------------------------------------------------------------------
    text_rule(
        "cuda.invalid-call",
        r"(?:CUDA|HIP|[Cc]uda)\b.{0,40}?[:'] ?'?(?:invalid (?:argument|configuration argument|device function|resource handle|value"
        r"|device symbol|device context)|too many resources requested|named symbol not found|operation not (?:supported|permitted)"
        r"|API call is not supported)"
        r"|cudaError(?:InvalidValue|InvalidConfiguration|InvalidDeviceFunction|SymbolNotFound|NotSupported|LaunchOutOfResources)"
        r"|CUDA_ERROR_(?:INVALID_VALUE|INVALID_HANDLE|NOT_FOUND|NOT_SUPPORTED|LAUNCH_OUT_OF_RESOURCES|INVALID_IMAGE|INVALID_PTX)",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.55, Blames.CODE,
        "CUDA was called in a way that this GPU, driver or toolkit does not allow", _CUDA,
    ),
    text_rule(
        "cuda.unknown-error", r"(?:CUDA|HIP|[Cc]uda)\b.{0,40}?[:'] ?'?unknown error|CUDA_ERROR_UNKNOWN|cudaErrorUnknown|hipErrorUnknown",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.4, Blames.GPU,
        "the driver is in a state that it has no name for; often only a reload helps", _CUDA,
    ),
    text_rule(
        "cuda.launch-timeout", r"launch timed out and was terminated|LAUNCH_TIMEOUT|LaunchTimeout",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
        "a kernel ran longer than the driver allows", _CUDA,
    ),
    text_rule(
        "cublas.execution", r"CUBLAS_STATUS_EXECUTION_FAILED",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.4, Blames.CODE,
        "a matrix kernel could not run: mostly a toolkit that does not fit the GPU, or an earlier kernel's fault", _CUBLAS,
    ),
    text_rule(
        "gpu.math-library",
        r"CUSOLVER_STATUS_\w|CUSPARSE_STATUS_\w|CUFFT_(?:INTERNAL|EXEC|SETUP)|miopenStatus\w|hipblasStatus|HIPBLAS_STATUS|rocblas_status",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.35, Blames.RANK,
        "a library of the GPU failed; its code alone does not say why", _SOLVER,
    ),
    text_rule(
        "gpu.oom-framework",
        r"OOM when allocating|ResourceExhausted|RESOURCE_EXHAUSTED: (?!.*message larger)|memory space hbm|memory for the cache blocks"
        r"|EL0004: |aclrtMalloc\w* failed|[Nn]ot enough (?:GPU|device|HBM) memory|ailed to allocate .{1,40}(?:on GPU|on device|HBM)",
        Verdict.OOM_GPU, Strength.CAUSE, 0.8, Blames.GPU,
        "the framework asked the device for more memory than it has", _XLA,
    ),
    text_rule(
        "tpu.in-use", r"TPU is already in use|libtpu lockfile|[Uu]nable to initialize backend 'tpu'|TPU initialization failed",
        Verdict.PROCESS_FAULT, Strength.CAUSE, 0.6, Blames.NODE,
        "a process that was left over still holds the accelerator", _TPU,
    ),
    text_rule(
        "tpu.unhealthy", r"TPU .{0,40}(?:unhealthy|UNHEALTHY)|UNHEALTHY_TENSORFLOW|UNHEALTHY_MAINTENANCE",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.75, Blames.NODE,
        "the provider's health check took the accelerator out of service", _TPU,
    ),
    text_rule(
        "npu.device-error",
        r"E[ZE]9999: |device response code|drvRetCode|HBM .{0,20}multi-?bit|driver error:internal error",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
        "the accelerator's driver reports an inner error; the code alone does not tell program from device", _NPU,
    ),
    text_rule(
        "npu.kernel", r"aicore (?:timeout|exception|error)",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
        "a kernel failed on the accelerator", _NPU,
    ),
    # --- communication ----------------------------------------------------------------------------------------------
    text_rule(
        "ofi.no-provider", r"provider \w+ output empty list|No eligible providers",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.5, Blames.CODE,
        "the fabric that was asked for does not exist in this container or on this host", _OFI,
    ),
    text_rule(
        "ofi.request-failed", r"NET/OFI .{0,60}(?:completed with error|Couldn't|failed)|fi_mr_reg\w* failed",
        Verdict.UNKNOWN, Strength.SYMPTOM, 0.3, Blames.RANK,
        "the fabric refused a request: set-up, a peer that is gone, or the adapter", _OFI,
    ),
    text_rule(
        "ucx.error", r"UCX +ERROR|UCXError|ucp_\w+\(\) failed",
        Verdict.UNKNOWN, Strength.SYMPTOM, 0.3, Blames.RANK,
        "the transport failed; which endpoint did is in the line", _UCX,
    ),
    text_rule(
        "nccl.bootstrap-broken", r"socketPollConnect|socketFinalizeAccept|wrong type \d|[Mm]agic mismatch|unexpected (?:magic|message type)",
        Verdict.TRANSIENT, Strength.SYMPTOM, 0.35, Blames.LINK,
        "connecting did not go as it should: lost packets, or a stranger on the port", _NCCL,
    ),
    text_rule(
        "hub.server-error",
        r"HTTPError\W{1,6}5\d\d|HTTP/1\.[01] 5\d\d|5\d\d Server Error|Internal Server Error|IncompleteRead|ServerDisconnected"
        r"|UNEXPECTED_EOF_WHILE_READING|wandb.{0,40}[Nn]etwork error|[Ee]rror communicating with wandb|status[_ ]code[=: ]{1,2}5\d\d|StatusCode\.UNAVAILABLE|EtcdConnectionFailed|EtcdException",
        Verdict.TRANSIENT, Strength.CAUSE, 0.75, Blames.NOBODY,
        "a service outside the job had a fault of its own", _HTTP,
    ),
    # --- storage ----------------------------------------------------------------------------------------------------
    text_rule(
        "store.refused",
        r"An error occurred \((?:NoSuchKey|NoSuchBucket|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken\w*|403|404"
        r"|InvalidToken|UnauthorizedOperation)\)|Unable to locate credentials|NoCredentialsError|ClientAuthenticationError"
        r"|google\.api_core\.exceptions\.(?:NotFound|Forbidden|PermissionDenied|Unauth\w+)|ResourceNotFoundError|certificate verify failed",
        Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE,
        "the object store knows the request and refuses it: name, credentials or rights are wrong", _S3,
    ),
    text_rule(
        "store.unavailable",
        r"An error occurred \((?:InternalError|ServiceUnavailable|RequestTimeout\w*|Throttl\w+|503|500|RequestLimitExceeded|TooMany\w+)\)"
        r"|azure\.core\.exceptions\.(?:Service\w+Error|HttpResponseError)"
        r"|google\.api_core\.exceptions\.(?:InternalServerError|DeadlineExceeded|RetryError|BadGateway)",
        Verdict.TRANSIENT, Strength.CAUSE, 0.75, Blames.STORAGE,
        "the object store was overloaded or had a fault of its own", _S3,
    ),
    text_rule(
        "net.not-connected", r"Transport endpoint is not connected",
        Verdict.TRANSIENT, Strength.SYMPTOM, 0.4, Blames.LINK,
        "a socket lost its other end; of a file it would be said which", _ERRNO,
    ),
    text_rule(
        "storage.errno",
        r"Errno (?:6|19|52|61|70|74|117|123)\]|Structure needs cleaning|Communication error on send|Required key not available"
        r"|resource busy: '[^']*\.nfs",
        Verdict.STORAGE, Strength.CAUSE, 0.75, Blames.STORAGE,
        "an error number with which file systems and devices say that they are broken or gone", _ERRNO,
    ),
    text_rule(
        "storage.client",
        r"mmfsd?: |GPFS: .*(?:unmount|panic|[Ss]tale)|beegfs.*(?:ommunication error|unable to)|libceph: .*(?:socket closed|down|lost)"
        r"|(?:gcsfuse|s3fs|goofys|juicefs|wekafs|blobfuse).*(?:rror: |ailed to |timed out)",
        Verdict.STORAGE, Strength.SYMPTOM, 0.65, Blames.STORAGE,
        "the client of a shared file system complains", _LUSTRE,
    ),
    text_rule(
        "storage.data-loss",
        r"DATA_LOSS|[Cc]hecksum (?:mismatch|error|failed|does not match)|onsistency check failed: file|pickle data was truncated",
        Verdict.STORAGE, Strength.CAUSE, 0.75, Blames.STORAGE,
        "what was read is not what was written", _GRPC,
    ),
    text_rule(
        "data.damaged",
        r"image file is truncated|cannot identify image file|broken data stream|[Cc]orrupt(?:ed)? (?:JPEG|image|record|parquet)|[Pp]remature (?:frame )?end\b"
        r"|Unexpected end of input|file end(?:s unexpectedly|ed before the end-of-stream)|Not a gzipped file|incorrect header check",
        Verdict.STORAGE, Strength.SYMPTOM, 0.55, Blames.STORAGE,
        "a file of the data set is not complete; it will be read again in every epoch", _LOADER,
    ),
    text_rule(
        "native.check-failed",
        r"Check failed: |CHECK failed|INTERNAL ASSERT FAILED|panicked at|enforce fail at|Fatal Python error|terminate called without an active exception",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
        "a library found itself in a state that it holds to be impossible", _NATIVE,
    ),
    text_rule(
        "host.bad-alloc", r"std::bad_alloc",
        Verdict.OOM_HOST, Strength.SYMPTOM, 0.5, Blames.NODE,
        "a native library got no memory, or asked for a size that is absurd", _BAD_ALLOC,
    ),
    text_rule(
        "loader.timeout", r"DataLoader timed out after|Pin memory thread exited unexpectedly|can only test a child process",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.45, Blames.RANK,
        "a process that loads data is stuck or gone", _LOADER,
    ),
    # --- the program ------------------------------------------------------------------------------------------------
    text_rule(
        "libs.missing", r"Unable to load NCCL library|Could not load library lib\w|Unable to load any of \{|[Nn]o suitable (?:cudnn|library)",
        Verdict.USER_ERROR, Strength.CAUSE, 0.7, Blames.CODE,
        "a library that the framework needs is not in the environment", _CUDA,
    ),
    text_rule(
        "user.configuration",
        r"(?:unrecognized|unexpected|unknown|unsupported) (?:configuration|config|argument|option|parameter|keyword|flag)"
        r"|invalid (?:configuration|config|option|parameter|keyword) |unexpected keyword argument|required positional|multiple values for"
        r"|is not a valid (?:value|choice)|Mesh '\w+' is not available|must have the same mesh|is not equal to the input argument|variant of untagged enum"
        r"|(?:tensor|pipeline|expert|context)[ _-](?:model[ _-])?parallel\S* (?:size|degree).{0,40}(?:must|should|not|exceed)"
        r"|(?:batch|sequence|hidden|vocab)\w*[ _](?:size|length).{0,40}(?:must|should) ",
        Verdict.USER_ERROR, Strength.CAUSE, 0.75, Blames.CODE,
        "the configuration contradicts itself, the library or the checkpoint", _PARALLEL,
    ),
    text_rule(
        "user.shell", r"command not found|[Pp]ermission denied|No such file or directory|[Oo]peration not permitted",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.5, Blames.CODE,
        "a command of a script failed; many scripts go on after that, so it may not be what ended the job", _SHELL,
    ),
    text_rule(
        "user.tensors",
        r"leaf Variable|nput type .{0,40}should be the same|xpected (?:m1|mat1|input|self|tensor|query|\d-?D|more than|floating|object of)"
        r"|got (?:input )?\d+ channels|have the same dtype|same device|not implemented for '\w+'|[Cc]an(?:no|')t pickle|Given groups="
        r"|stack expects each tensor|each element in list of batch|result type .{0,30}can't be cast|The size of tensor"
        r"|cannot be broadcast|[Ss]hape mismatch|dimension out of range|Boolean value of Tensor|Only Tensors of floating",
        Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE,
        "tensors of the wrong shape, type or device", _TORCH,
    ),
)  # fmt: skip
