"""Rules for schedulers, memory of the host and storage. Specific before general: the first match decides a line."""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Rule, text_rule

_SLURM = "https://slurm.schedmd.com/squeue.html"
_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_CGROUP = "https://docs.kernel.org/admin-guide/cgroup-v2.html"
_OOM = "https://docs.kernel.org/admin-guide/mm/concepts.html"
_EVICT = "https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/"
_DISRUPT = "https://kubernetes.io/docs/concepts/workloads/pods/disruptions/"
_POD = "https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/"
_IMAGES = "https://kubernetes.io/docs/concepts/containers/images/"
_VOLUMES = "https://kubernetes.io/docs/concepts/storage/volumes/"
_ERRNO = "https://man7.org/linux/man-pages/man3/errno.3.html"
_ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/run.html"
_SIGNALS = "https://man7.org/linux/man-pages/man7/signal.7.html"
_RAY_OOM = "https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html"
_DATA = "https://docs.pytorch.org/docs/stable/data.html"
_SHM = "https://man7.org/linux/man-pages/man7/shm_overview.7.html"
_LOAD = "https://docs.pytorch.org/docs/stable/generated/torch.load.html"
_SAFE = "https://huggingface.co/docs/safetensors/index"
_NFS = "https://man7.org/linux/man-pages/man5/nfs.5.html"
_NVME = "https://docs.kernel.org/admin-guide/kernel-parameters.html"
_SPOT = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"

SYSTEM: tuple[Rule, ...] = (
    # --- schedulers -------------------------------------------------------------------------------------------------
    text_rule(
        "slurm.node-failure",
        r"DUE TO NODE FAIL|[Nn]ode [Ff]ailure|node_fail\b|NODE_FAIL|Kill task failed|count reported lower than configured|Low RealMemory|error: Nodes? [\w.,\[\]-]+ not responding|BOOT_FAIL|[Pp]rolog (?:failed|error)",
        Verdict.NODE_FAULT,
        Strength.PROOF,
        0.9,
        Blames.NODE,
        "the scheduler took a node of the job out of service",
        _SLURM,
    ),
    text_rule(
        "slurm.time-limit",
        r"DUE TO TIME LIMIT|\bstate[ =:]+TIMEOUT\b|JobState=(?:TIMEOUT|DEADLINE)|(?<!exceptions\.)DeadlineExceeded|\bTIMEOUT +\d+:\d+|TERM_RUNLIMIT|walltime \S+ exceeded limit",
        Verdict.PREEMPTION,
        Strength.CAUSE,
        0.95,
        Blames.NOBODY,
        "the job's time was up: nothing is broken",
        _SLURM,
    ),
    text_rule(
        "slurm.preempted",
        r"DUE TO (?:PREEMPTION|JOB REQUEUE|JOB SUSPEND)|JobState=(?:PREEMPTED|REQUEUED|SUSPENDED)|[Jj]ob \S+ (?:was )?preempted|\bPREEMPTED +\d+:\d+",
        Verdict.PREEMPTION,
        Strength.CAUSE,
        0.95,
        Blames.NOBODY,
        "the scheduler took the nodes away for another job",
        _SLURM,
    ),
    text_rule(
        "cloud.reclaimed",
        r"[Ss]pot (?:[Ii]nstance )?(?:interruption|termination|reclaim)|spot/instance-action|[Pp]reemptible.{0,40}(?:terminat|preempt)"
        r"|TERMINATE_ON_HOST_MAINTENANCE|[Nn]ode is shutting down|imminent node shutdown|NodeShutdown|TerminationByKubelet"
        r"|reason: ?(?:Preempting|Preempted|PreemptionByScheduler|EvictionByEvictionAPI)|Preempted in order to admit",
        Verdict.PREEMPTION,
        Strength.CAUSE,
        0.9,
        Blames.NOBODY,
        "the provider or the cluster announced that it takes the node back",
        _SPOT,
    ),
    text_rule(
        "cluster.mass-loss",
        r"(?:failing|lost|losing|removing|evicting|marking) (?:[3-9]|\d\d+) (?:workers|nodes|hosts|executors|agents)",
        Verdict.TRANSIENT,
        Strength.CAUSE,
        0.6,
        Blames.NOBODY,
        "many at once have one cause outside them: start-up, a controller, a network; not as many bad nodes",
        _DISRUPT,
    ),
    text_rule(
        "slurm.cancelled",
        r"JobState=CANCELLED|CANCELLED by \d+|[Jj]ob \S+ cancell?ed by user",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.7,
        Blames.NOBODY,
        "a person cancelled the job; it must not be started again by itself",
        _SLURM,
    ),
    text_rule(
        "slurm.step-cancelled",
        r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED|Force Terminated|Job step aborted|Waiting up to \d+ seconds for job step",
        Verdict.UNKNOWN,
        Strength.ECHO,
        0.1,
        Blames.NOBODY,
        "the scheduler ends the other tasks because one failed; the node it names is only the first of the step",
        _SBATCH,
    ),
    text_rule(
        "kube.node-lost",
        r"NodeNotReady|NodeLost|DeletionByTaintManager|TaintManagerEviction|node\.kubernetes\.io/(?:unreachable|not-ready)|Node is not ready",
        Verdict.NODE_FAULT,
        Strength.PROOF,
        0.85,
        Blames.NODE,
        "the cluster has lost contact with the node",
        _DISRUPT,
    ),
    text_rule(
        "kube.image",
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|CreateContainerConfigError|RunContainerError|exec format error",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.8,
        Blames.CODE,
        "the container could not be made from what was asked for",
        _IMAGES,
    ),
    text_rule(
        "kube.volume",
        r"FailedMount|MountVolume\.SetUp failed|Unable to attach or mount volumes|FailedAttachVolume",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.8,
        Blames.STORAGE,
        "a volume could not be mounted on the node",
        _VOLUMES,
    ),
    text_rule(
        "kube.backoff",
        r"BackoffLimitExceeded|CrashLoopBackOff|Back-off restarting failed",
        Verdict.UNKNOWN,
        Strength.ECHO,
        0.1,
        Blames.NOBODY,
        "the cluster gave up restarting; why each attempt failed is in the attempts",
        _POD,
    ),
    # --- memory of the host -----------------------------------------------------------------------------------------
    text_rule(
        "host.oom-killer",
        r"[Oo]om[-_][Kk]ill(?!\w* 0\b)|invoked oom-killer|killed by the OOM killer|Out of memory: Kill|Memory cgroup out of memory|OOM[- ]?[Kk]illed"
        r"|tasks? [\d,\-]+: Out Of Memory|\bOUT_OF_ME|Killed process \d+ \(|oom_reaper|systemd-oomd.{0,40}[Kk]illed|TERM_MEMLIMIT|job killed: v?mem|Exceeded (?:job|step) memory limit|exceeded memory limit .{0,40}being killed"
        r"|reason: ?OOMKilled|oom_kill [1-9]",
        Verdict.OOM_HOST,
        Strength.PROOF,
        0.95,
        Blames.NODE,
        "the kernel killed a process of the job because the host or its memory limit was full",
        _OOM,
    ),
    text_rule(
        "host.evicted-memory",
        r"low on resource: memory|MemoryPressure(?!\s+(?:False|Unknown))|running low on memory|due to memory pressure",
        Verdict.OOM_HOST,
        Strength.PROOF,
        0.9,
        Blames.NODE,
        "the node ran out of memory and the process was evicted",
        _EVICT,
    ),
    text_rule(
        "host.evicted-disk",
        r"low on resource: (?:ephemeral-storage|nodefs|imagefs|inodes)|(?<!No)DiskPressure(?!\s+(?:False|Unknown))|exceeds the total limit of containers|local ephemeral storage",
        Verdict.STORAGE,
        Strength.PROOF,
        0.9,
        Blames.STORAGE,
        "the node's local disk was full and the process was evicted",
        _EVICT,
    ),
    text_rule(
        "ray.out-of-memory",
        r"ray\.exceptions\.OutOfMemoryError|Task was killed due to the node|worker\(s\) were killed due to",
        Verdict.OOM_HOST,
        Strength.PROOF,
        0.9,
        Blames.NODE,
        "Ray killed the worker because the node's memory was nearly full",
        _RAY_OOM,
    ),
    text_rule(
        "loader.killed",
        r"DataLoader worker \(pid\D*\d+\) is killed by signal: Killed",
        Verdict.OOM_HOST,
        Strength.CAUSE,
        0.55,
        Blames.NODE,
        "something killed a data loader process without its consent: mostly the kernel, for memory; only its log or the cgroup can prove that",
        _DATA,
    ),
    text_rule(
        "loader.bus-error",
        r"Unexpected bus error encountered in worker|worker \(pid\D*\d+\) is killed by signal: Bus error|insufficient shared memory",
        Verdict.OOM_HOST,
        Strength.SYMPTOM,
        0.45,
        Blames.NODE,
        "writing to /dev/shm failed: too small for the loader's workers, full of a dead job's files, or bad memory",
        _SHM,
    ),
    text_rule(
        "loader.crashed",
        r"DataLoader worker \(pid\D*\d+\) is killed by signal: (?:Segmentation|Abort|Floating|Illegal)",
        Verdict.PROCESS_FAULT,
        Strength.SYMPTOM,
        0.5,
        Blames.RANK,
        "native code in a data loader process crashed: a decoder or a damaged sample",
        _DATA,
    ),
    text_rule(
        "loader.exited",
        r"DataLoader worker \(pid\(?s?\)?[\d, ()]*\)? (?:exited unexpectedly|is killed by signal)",
        Verdict.OOM_HOST,
        Strength.SYMPTOM,
        0.35,
        Blames.RANK,
        "a data loader process died, mostly for want of memory; its own output or the kernel log says why",
        _DATA,
    ),
    text_rule(
        "shm.full",
        r"(?:posix_fallocate|shared memory|/dev/shm|shm_open|nccl-|</torch_).{0,120}No space left on device"
        r"|Error while creating shared memory segment|open shared memory object|failed to extend /dev/shm|unable to (?:mmap|write) .{0,60}</torch_"
        r"|unable to allocate shared memory",
        Verdict.OOM_HOST,
        Strength.CAUSE,
        0.7,
        Blames.NODE,
        "/dev/shm is full: left-overs of a process that was killed, or a container whose limit is too small",
        _SHM,
    ),
    text_rule(
        "host.no-memory",
        r"\bMemoryError\b|can't allocate memory: you tried|not enough memory: you tried|Unable to allocate .{1,40} for an array"
        r"|(?:fork|clone|mmap|malloc|Popen).{0,60}Cannot allocate memory|Errno 12\]",
        Verdict.OOM_HOST,
        Strength.CAUSE,
        0.75,
        Blames.NODE,
        "the host refused memory to the process",
        _OOM,
    ),
    # --- signals from outside ---------------------------------------------------------------------------------------
    text_rule(
        "human.interrupt",
        r"(?: 2|SIGINT) death signal|\^CTraceback|got signal: 2\b|closing signal SIGINT|KeyboardInterrupt|Received SIGINT",
        Verdict.USER_ERROR,
        Strength.CAUSE,
        0.8,
        Blames.NOBODY,
        "a person stopped the job; it must not be started again by itself",
        _SIGNALS,
    ),
    text_rule(
        "session.hang-up",
        r"Received (?:1|Signals\.SIGHUP) death signal|got signal: 1\b|closing signal SIGHUP",
        Verdict.PROCESS_FAULT,
        Strength.CAUSE,
        0.8,
        Blames.NODE,
        "the terminal or ssh session the launcher belonged to was closed",
        _SIGNALS,
    ),
    text_rule(
        "agent.terminated",
        r"(?:15|SIGTERM) death signal|Received SIGTERM|SIGTERM received|[Rr]eceived signal 15|[Cc]aught signal 15|got signal: 15\b",
        Verdict.PREEMPTION,
        Strength.SYMPTOM,
        0.65,
        Blames.NODE,
        "somebody outside asked this node's launcher to stop",
        _ELASTIC,
    ),
    text_rule(
        "agent.closing",
        r"closing signal SIGTERM|Unable to shutdown process \d+ via|SignalException",
        Verdict.UNKNOWN,
        Strength.ECHO,
        0.1,
        Blames.NOBODY,
        "the launcher ends the other workers because one failed",
        _ELASTIC,
    ),
    # --- storage ----------------------------------------------------------------------------------------------------
    text_rule(
        "storage.stale-handle",
        r"[Ss]tale (?:NFS )?file handle|\bESTALE\b|Errno 116",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.9,
        Blames.STORAGE,
        "the file server no longer knows the file: it was replaced, or the export was moved, while it was open",
        _ERRNO,
    ),
    text_rule(
        "storage.io-error",
        r"Errno 5\]|Input/output error|\bEIO\b|Errno 121\]|Remote I/O error|Errno 37\]|No locks available|unable to lock file|Errno 110\] [^\n]*: '/",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.85,
        Blames.STORAGE,
        "a disk or a network file system could not read or write",
        _ERRNO,
    ),
    text_rule(
        "storage.full",
        r"No space left on device|\bENOSPC\b|Errno 28|[Dd]isk quota exceeded|\bEDQUOT\b|Errno 122",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.85,
        Blames.STORAGE,
        "the file system or the quota is full",
        _ERRNO,
    ),
    text_rule(
        "storage.read-only",
        r"[Rr]ead-only file system|\bEROFS\b|Errno 30\]|[Rr]emounting filesystem read-only",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.85,
        Blames.STORAGE,
        "the file system was switched to reading only, which kernels do after errors",
        _ERRNO,
    ),
    text_rule(
        "storage.disconnected",
        r"(?:['\"]/|[Ee]rror|access|stat|open|read|write|mount|list|cd|ls|cp|mkdir)\b.{0,200}[^(]: Transport endpoint is not connected|Transport endpoint is not connected: |Errno 107\]|Errno 112\] Host is down|Cannot send after transport endpoint shutdown|Errno 108\]",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.8,
        Blames.STORAGE,
        "the client of a network file system lost its server",
        _ERRNO,
    ),
    text_rule(
        "storage.server-silent",
        r"(?:nfs|NFS):? server .{1,80}not {1,2}responding|LustreError|Lustre: .{0,80}Request sent has|ceph: mds\d+ (?:hung|caps stale)|Lustre: .{0,80}(?:evicted|[Cc]onnection .{0,20}lost)",
        Verdict.STORAGE,
        Strength.SYMPTOM,
        0.65,
        Blames.STORAGE,
        "a file server does not answer",
        _NFS,
    ),
    text_rule(
        "storage.nvme",
        r"nvme\S* .{0,60}(?:controller is down|I/O \S+ .{0,40}timeout|Device not ready|Removing after probe failure|Disabling device)",
        Verdict.STORAGE,
        Strength.PROOF,
        0.8,
        Blames.NODE,
        "the node's local disk stopped answering",
        _NVME,
    ),
    text_rule(
        "storage.block-error",
        r"(?:blk_update_request|Buffer I/O|critical medium|I/O) error,? (?:on )?dev|EXT4-fs error|XFS .{0,60}(?:[Cc]orruption|[Ss]hutting down)",
        Verdict.STORAGE,
        Strength.PROOF,
        0.8,
        Blames.NODE,
        "a disk of the node returned errors to the kernel",
        _NVME,
    ),
    text_rule(
        "storage.checkpoint-damaged",
        r"PytorchStreamReader failed|finding central directory|could not parse ModelProto|invalid header or archive is corrupted|BadZipFile|not a zip file"
        r"|HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer|Ran out of input|SafetensorError|PytorchStreamWriter failed|[Uu]nexpected (?:EOF|end of (?:file|data|stream|archive))|truncated file|CRC check failed|magic bytes not found|invalid load key"
        r"|corrupted? checkpoint|[Cc]heckpoint .{0,40}(?:is corrupt|incomplete|truncated)|unexpected pos \d+ vs",
        Verdict.STORAGE,
        Strength.CAUSE,
        0.8,
        Blames.STORAGE,
        "a file was not written or copied completely: resume from the checkpoint before it",
        _LOAD,
    ),
    text_rule(
        "storage.object-store",
        r"\bSlowDown\b|botocore\.exceptions\.\w*(?:Timeout|Connection)\w*|EndpointConnectionError|ServiceUnavailable.{0,40}(?:S3|GetObject|PutObject)"
        r"|google\.api_core\.exceptions\.(?:ServiceUnavailable|TooManyRequests|GatewayTimeout)",
        Verdict.TRANSIENT,
        Strength.CAUSE,
        0.75,
        Blames.STORAGE,
        "the object store asked to be left alone for a while, or did not answer",
        "https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html",
    ),
    text_rule(
        "storage.bad-descriptor",
        r"Errno 9\] Bad file descriptor",
        Verdict.STORAGE,
        Strength.SYMPTOM,
        0.45,
        Blames.STORAGE,
        "an open file went away under the process",
        _ERRNO,
    ),
)
