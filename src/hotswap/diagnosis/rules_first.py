"""Rules for sentences that a general rule further down would take for something else. They are tried before all others of text."""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Rule, text_rule

_SIGNALS = "https://man7.org/linux/man-pages/man7/signal.7.html"
_WATCH = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_HCCL = "https://www.hiascend.com/document/detail/en/CANNCommunityEdition/900/API/hcclug/hcclug_000059.html"
_ERRNO = "https://man7.org/linux/man-pages/man2/write.2.html"
_ASYNC = "https://man7.org/linux/man-pages/man3/ibv_get_async_event.3.html"
_RAY = "https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html"
_RAY_MEMORY = "https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html"
_RDZV = "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html"
_JAX = "https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html"
_GLOO = "https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables"
_UCX = "https://openucx.readthedocs.io/en/master/faq.html"
_CUDA = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_SLURM_NODE = "https://slurm.schedmd.com/sinfo.html"
_SLURM_CONF = "https://slurm.schedmd.com/slurm.conf.html"
_KUBE_NODE = "https://kubernetes.io/docs/reference/node/node-status/"
_KUBE_LIMIT = "https://kubernetes.io/docs/tasks/configure-pod-container/assign-memory-resource/"
_SPOT = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"
_SLURM_TIME = "https://slurm.schedmd.com/sbatch.html"
_AER = "https://docs.kernel.org/PCI/pci-error-recovery.html"
_APEI = "https://docs.kernel.org/admin-guide/RAS/main.html"
_AMD = "https://docs.kernel.org/gpu/amdgpu/ras.html"
_DCGM = "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html"
_XID = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
_HIP = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/error_codes.html"
_MLX5 = "https://docs.kernel.org/networking/devlink/mlx5.html"
_IBSTAT = "https://man7.org/linux/man-pages/man3/ibv_query_port.3.html"
_OOPS = "https://docs.kernel.org/admin-guide/bug-hunting.html"
_RAID = "https://docs.kernel.org/admin-guide/md.html"
_LAUNCH = "https://docs.open-mpi.org/en/main/launching-apps/index.html"
_HTTP = "https://developer.mozilla.org/en-US/docs/Web/HTTP/Status"
_BUILD = "https://docs.pytorch.org/docs/stable/cpp_extension.html"
_SILENT = "https://arxiv.org/abs/2102.11245"
_BMC = "https://docs.kernel.org/driver-api/ipmi.html"

FIRST: tuple[Rule, ...] = (
    # --- what an agent of hotswap says of a worker that it has ended ---------------------------------------------------
    text_rule(
        "job.worker-stopped", r"stopped by a signal for more than",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.55, Blames.RANK,
        "the process was stopped from outside (SIGSTOP, SIGTSTP, a batch system's suspend) and not continued", _SIGNALS,
    ),
    text_rule(
        "job.worker-hung", r"hung: slots? \d|\d (?:has|have) not entered operation \d|outside of communication, in which slots? \d",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.5, Blames.RANK,
        "others waited for this worker in vain: a deadlock, data that never comes, or a call that it left out", _WATCH,
    ),
    text_rule(
        "job.worker-unparked", r"did not leave the old generation within",
        Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.RANK,
        "a worker that could not be stopped in place after something else had failed", _WATCH,
    ),
    text_rule(
        "job.state-differs", r"its state differs from that of its peers at step",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.6, Blames.NODE,
        "of several copies of the same state only this one differs: a processor, memory or a bus changed it silently", _SILENT,
    ),
    text_rule(
        "job.states-undecided", r"hold different states at step \d+, and nobody can tell which",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.4, Blames.NOBODY,
        "copies of the same state differ, and there are too few to tell which one was changed silently", _SILENT,
    ),
    text_rule(
        "ray.exit-detail", r"Worker exit type: |Worker unexpectedly exits with|potential root causes",
        Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
        "Ray lists what it might have been; none of that was observed", _RAY,
    ),
    text_rule(
        "rdzv.agent-lost", r"failed to (?:send a keep-alive heartbeat to|shutdown|close) the rendezvous",
        Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
        "the host of the rendezvous is gone: it ended first, and says why", _RDZV,
    ),
    text_rule(
        "hub.client-error",
        r"urlopen error (?!unknown url)|(?:requests\.exceptions|urllib3\.exceptions|httpx|httpcore|aiohttp\.\w{1,40})"
        r"\.\w{0,20}(?:Connect|Timeout|Protocol|SSL|Chunked|Proxy|Retry|Pool|Network|Read|Write|Remote|Payload|OSError)\w*"
        r"|http\.client\.(?:Remote|Incomplete|BadStatus)\w+",
        Verdict.TRANSIENT, Strength.CAUSE, 0.8, Blames.NOBODY,
        "a client of a service outside the job got no answer", _HTTP,
    ),
    text_rule(
        "jax.peer-lost",
        r"heartbeat timeout\. This indicates|remote task has failed, got preempted|JAX distributed service detected"
        r"|DEADLINE_EXCEEDED: [Bb]arrier|coordination service agent|Shutdown barrier",
        Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.PEER,
        "a task of the job stopped answering its coordinator: that task knows why", _JAX,
    ),
    text_rule(
        "net.loopback",
        r"connect \[(?:127\.0\.|::1)|remote=\[(?:127\.0\.|::1)|local=\[(?:127\.0\.|::1)|loopback address as fallback",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.65, Blames.CODE,
        "ranks on several hosts told each other their loopback address: host name or interface is set wrongly", _GLOO,
    ),
    text_rule(
        "nic.locked-memory", r"max locked memory|RLIMIT_MEMLOCK|locked memory limit|memlock limit",
        Verdict.USER_ERROR, Strength.CAUSE, 0.7, Blames.CODE,
        "the limit of locked memory is too small for the adapter: a setting of the container or the login", _UCX,
    ),
    text_rule(
        "cuda.driver-combination", r"unsupported display driver|SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.7, Blames.NODE,
        "kernel driver and CUDA libraries of this node do not fit together", _CUDA,
    ),
    # --- schedulers -------------------------------------------------------------------------------------------------
    text_rule(
        "slurm.node-reason",
        r"Node unexpectedly re|Not responding +\w+ +\d{4}-|reboot timed out|Low TmpDisk|Duplicate jobid|batch job complete failure|[Ee]pilog error"
        r"|\b(?:down|drain|drng|fail)\*? .*Not responding|Reason=(?:NHC|Not responding)|ealth ?check failed",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
        "the reason for which the scheduler took the node out of service", _SLURM_NODE,
    ),
    text_rule(
        "slurm.node-down",
        r"\bState=(?:DOWN|FAIL|ERROR|UNKNOWN|NOT_RESPONDING|POWERED_DOWN)|\bState=[A-Z+]{0,30}\+(?:DRAIN|FAIL|NOT_RESPONDING|DOWN)"
        r"|(?:up|down|drain|inact) +\S+ +\d+ +(?:down|fail|error)\*? ",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.7, Blames.NODE,
        "the scheduler lists the node as down or taken out; its reason says whether that is a fault or maintenance", _SLURM_NODE,
    ),
    text_rule(
        "slurm.node-description", r"Node configuration differs from hardware|gres\.conf",
        Verdict.USER_ERROR, Strength.CAUSE, 0.6, Blames.NODE,
        "the scheduler's description of the node is not what the node has", _SLURM_CONF,
    ),
    text_rule(
        "kube.node-broken",
        r"KubeletNotReady|Kubelet stopped posting node status|PLEG is not healthy|container runtime is down|KernelDeadlock"
        r"|ReadonlyFilesystem|NodeStatusUnknown",
        Verdict.NODE_FAULT, Strength.PROOF, 0.8, Blames.NODE,
        "the node reports a condition in which it cannot run the pod", _KUBE_NODE,
    ),
    text_rule(
        "kube.not-admitted", r"UnexpectedAdmissionError|Allocate failed due to requested",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.55, Blames.NODE,
        "the node has fewer devices than the scheduler counted on: one has failed, or their plugin was just starting again", _KUBE_NODE,
    ),
    text_rule(
        "kube.monitored", r"\w{3}IsNotHealthy\b|Recommended ?Action[=:] ?\W?(?:RESTART_BM|RESTART_VM|REPLACE_VM|CONTACT_SUPPORT)",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.7, Blames.NODE,
        "a monitor of the node's hardware found it broken", "https://docs.nvidia.com/nvsentinel/v1.31.0/components/syslog-health-monitor.md",
    ),
    text_rule(
        "kube.no-room", r"FailedScheduling|\d nodes are available|Insufficient (?:nvidia\.com/gpu|memory|cpu)|Unschedulable",
        Verdict.UNKNOWN, Strength.CONTEXT, 0.3, Blames.NOBODY,
        "no node had room for the pod: it waits, or asks for what no node has",
        "https://kubernetes.io/docs/concepts/scheduling-eviction/kube-scheduler/",
    ),
    text_rule(
        "cloud.notice",
        r"this job is (?:preempted|timed-out)|[Pp]reemption notice|Requeued job \d|TerminateScheduled|instance-action|[Mm]aintenance event"
        r"|\"EventType\": ?\"(?:Preempt|Terminate|Reboot|Redeploy)|preempted by|(?:was|is|been|got) preempted\b(?!,)"
        r"|marked for (?:preemption|reclaim)|Preempted by|drained for maintenance|[Ee]victing pod",
        Verdict.PREEMPTION, Strength.CAUSE, 0.9, Blames.NOBODY,
        "the scheduler or the provider announced that it takes the node away", _SPOT,
    ),
    text_rule(
        "cloud.time-up",
        r"exceeded (?:its |the )?(?:time|wall)[ -]?(?:clock )?limit|longer than specified deadline|CPU time limit exceeded"
        r"|job killed: walltime|[Ww]all[ -]?time (?:limit )?(?:exceeded|reached)",
        Verdict.PREEMPTION, Strength.CAUSE, 0.85, Blames.NOBODY,
        "the time that the job had asked for was over", _SLURM_TIME,
    ),
    text_rule(
        "ray.memory-monitor", r"System memory low at node|exceeds the memory usage threshold|memory usage threshold of",
        Verdict.OOM_HOST, Strength.PROOF, 0.9, Blames.NODE,
        "Ray kills a worker before the host runs out of memory", _RAY_MEMORY,
    ),
    text_rule(
        "host.container-limit",
        r"memory limit too low|Container killed on request|MemoryLimitExceeded|beyond (?:the )?'?(?:PHYSICAL|physical) memory"
        r"|exceed(?:ed|s|ing) (?:its |the |physical )?memory limit",
        Verdict.OOM_HOST, Strength.PROOF, 0.85, Blames.NODE,
        "the container went over the memory that it was given", _KUBE_LIMIT,
    ),
    # --- hardware ---------------------------------------------------------------------------------------------------
    text_rule(
        "pcie.device-gone",
        r"Unable to change power state from|device inaccessible|\(rev ff\)|Cannot attach gpu|probe routine failed|pciehp: .*[Ll]ink Down",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.GPU,
        "the device no longer answers on PCIe: every register reads as all ones", _AER,
    ),
    text_rule(
        "cpu.apei-fatal", r"event severity: (?:fatal|recoverable)|Processor context corrupt|Fatal local machine check",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
        "firmware reports a hardware error that it could not correct", _APEI,
    ),
    text_rule(
        "cpu.apei-corrected",
        r"event severity: corrected|corrected by h/w|HANDLING MCE MEMORY ERROR|Machine check events logged"
        r"|(?<!un)correctable hardware errors detected",
        Verdict.TRANSIENT, Strength.CONTEXT, 0.65, Blames.NODE,
        "a hardware error that was corrected: to be counted", _APEI,
    ),
    text_rule(
        "amd.gpu-reset",
        r"amdgpu.*(?:MODE[12] reset|mode1 reset|GPU recovery|unrecoverable state|hw_fini|flush_gpu_tlb|test failed)"
        r"|HW Exception by GPU node|reason ?: ?GPU Hang",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.6, Blames.GPU,
        "the driver had to reset the GPU, and with it everything on its fabric", _AMD,
    ),
    text_rule(
        "dcgm.health",
        r"\|\s*Fail - (?:All|GPU)|GPU\d+ \.{3,99} FAIL|DCGM_FR_(?:FALLEN|GPU_FALLEN|VOLATILE_DBE|UNCONTAINED|PENDING|RETIRED|ROW_REMAP|NVLINK|NVSWITCH|FAULTY|CORRUPT|FABRIC|PCI)",
        Verdict.NODE_FAULT, Strength.PROOF, 0.8, Blames.NODE,
        "a check of NVIDIA's health agent failed on this node", _DCGM,
    ),
    text_rule(
        "bmc.event", r"\bIERR\b|Uncorrectable (?:ECC|machine check)|Power Supply.{0,60}(?:Failure detected|AC lost)|Thermal Trip",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
        "the board's own controller logged a failure of processor, memory, power or cooling", _BMC,
    ),
    # --- more schedulers and providers --------------------------------------------------------------------------------
    text_rule(
        "slurm.launch-failed",
        r"Task launch for StepId=\S+ failed on node|Munge decode failed|Invalid job credential|Rewound credential|Protocol authentication error",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.7, Blames.NODE,
        "the scheduler's daemon on a node refuses to start tasks: its clock, key or configuration differs", _SLURM_CONF,
    ),
    text_rule(
        "slurm.controller", r"Unable to contact slurm controller|Socket timed out on send/recv|Zero Bytes were transmitted or received",
        Verdict.TRANSIENT, Strength.CAUSE, 0.7, Blames.NOBODY,
        "the scheduler was too busy to answer", _SLURM_CONF,
    ),
    text_rule(
        "slurm.request",
        r"Requested node configuration is not available|Invalid generic resource|Batch job submission failed|[Ii]nvalid partition"
        r"|Invalid account or account/partition|More processors requested than permitted",
        Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE,
        "the scheduler cannot give what was asked for, ever", _SLURM_TIME,
    ),
    text_rule(
        "slurm.no-directory", r"couldn't chdir to",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.4, Blames.CODE,
        "the directory does not exist on the node; the step goes on in another one, where it may miss its files", _SLURM_TIME,
    ),
    text_rule(
        "cuda.no-peer-access", r"peer access is not supported|PeerAccessUnsupported|PEER_ACCESS_UNSUPPORTED",
        Verdict.USER_ERROR, Strength.SYMPTOM, 0.5, Blames.CODE,
        "these GPUs, or the way they are passed into a virtual machine, do not allow access between them", _CUDA,
    ),
    text_rule(
        "npu.waited",
        r"[Ss]tream synchronize timeout|stream sync timeout|reason=\[task timeout\]|timeout waiting event, all tasks",
        Verdict.UNKNOWN, Strength.ECHO, 0.2, Blames.RANK,
        "the accelerator waited for others in a collective", _HCCL,
    ),
    text_rule(
        "storage.short-write", r"wrote \d+ (?:blocks|bytes|items) instead of|[Ss]hort write\b|wrote only \d+ of",
        Verdict.STORAGE, Strength.SYMPTOM, 0.6, Blames.STORAGE,
        "less was written than asked for: the file system is full, over its quota or failing", _ERRNO,
    ),
    text_rule(
        "nic.device-fatal", r"async event ?: (?:\w+ )?(?:local catastrophic error|device fatal)|IBV_EVENT_DEVICE_FATAL",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.8, Blames.NODE,
        "the network adapter is in a state in which it can do nothing any more", _ASYNC,
    ),
    text_rule(
        "nic.queue-error",
        r"async event ?: (?:\w+ )?(?:CQ error|local work queue|invalid request local|local access violation|SRQ|path migration failed)"
        r"|IBV_EVENT_(?:CQ_ERR|QP_FATAL|QP_ACCESS_ERR|QP_REQ_ERR|SRQ_ERR)",
        Verdict.UNKNOWN, Strength.SYMPTOM, 0.3, Blames.RANK,
        "a queue of the network adapter failed: its program, its peer or the adapter", _ASYNC,
    ),
    text_rule(
        "cloud.capacity",
        r"InsufficientInstanceCapacity|InsufficientCapacity|CapacityError|ZONE_RESOURCE_POOL_EXHAUSTED|STOCKOUT|SkuNotAvailable",
        Verdict.TRANSIENT, Strength.CAUSE, 0.75, Blames.NOBODY,
        "the provider has no such machine to give at the moment", _SPOT,
    ),
    text_rule(
        "cloud.host-gone", r"Host EC2 \(instance|MaxRuntimeExceeded|MaxWaitTimeExceeded|TERM_PREEMPT",
        Verdict.PREEMPTION, Strength.CAUSE, 0.8, Blames.NOBODY,
        "the provider ended the host or the job's time", _SPOT,
    ),
    text_rule(
        "kube.sandbox", r"FailedCreatePodSandBox|failed to (?:set ?up|create) (?:pod )?sandbox|network plugin is not ready|cni plugin not initialized",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.55, Blames.NODE,
        "the node cannot set up a pod's network or file systems", _KUBE_NODE,
    ),
    text_rule(
        "kube.probe-failed", r"(?:Liveness|Startup) probe failed|failed liveness probe",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.4, Blames.RANK,
        "the process did not answer its health check and was restarted", _KUBE_NODE,
    ),
    text_rule(
        "launcher.setup",
        r"not enough slots available|unable to launch the specified application|Host key verification failed|could not find the executable"
        r"|Could not resolve hostname|could not select device driver|manifest unknown|pull access denied|CannotPullContainer",
        Verdict.USER_ERROR, Strength.CAUSE, 0.75, Blames.CODE,
        "the launcher cannot start processes as it was told: hosts, keys, slots or image", _LAUNCH,
    ),
    text_rule(
        "ssh.host-down", r"ssh: connect to host \S+ port \d+: ",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.5, Blames.NODE,
        "the launcher does not reach a host", _LAUNCH,
    ),
    text_rule(
        "gpu.missing", r"expected \d+ GPUs?\b.{0,20}(?:found|got|but)|found \d+ GPUs?\b.{0,20}expected|GPU count \d+.{0,20}expected",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.65, Blames.NODE,
        "a check counted fewer GPUs than the node should have", _DCGM,
    ),
    # --- more hardware ------------------------------------------------------------------------------------------------
    text_rule(
        "gpu.kernel-message", r"NVRM: .{0,80}(?:GSP|gsp[A-Z]|probably locked|RPC response|nvGpuOpsReportFatalError)|nvidia-uvm.{0,40}[Ff]atal",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.75, Blames.GPU,
        "the driver lost touch with the GPU's own firmware", _XID,
    ),
    text_rule(
        "gpu.start-failed",
        r"(?:cudaGetDeviceCount|cuInit|cuDevicePrimaryCtxRetain|nvmlInit)\b.{0,40}(?:error|ERROR|[Ff]ailed)"
        r"|(?:[Uu]nable|[Ff]ailed) to (?:create|initiali[sz]e|open|get|find) (?:a |the |any )?(?:CUDA|GPU|HIP)\b",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.5, Blames.NODE,
        "CUDA could not start on this node", _CUDA,
    ),
    text_rule(
        "gpu.imex", r"nvidia-imex.{0,60}(?:[Ff]ail|[Ee]rror|DEGRADED)|Fabric State is not (?:completed|ready)|NVLink.{0,40}(?:<inactive>|is inactive|is down)",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.75, Blames.NODE,
        "the node's part of the NVLink fabric is not up", _DCGM,
    ),
    text_rule(
        "cuda.launch-failure-unspecified", r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|hipErrorLaunchFailure|cudaErrorLaunchFailure",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.45, Blames.GPU,
        "a kernel died without a reason; where the cause was found, it was power, firmware or the board more often than the program", _CUDA,
    ),
    text_rule(
        "user.build",
        r"Error building extension|ninja: build stopped|fatal error: .{1,120}: No such file or directory|CUDA_HOME environment variable is not set"
        r"|mismatches the version that was used to compile|nvcc fatal|unsupported GNU version|[Ff]ailed building wheel|fatal error: too many errors",
        Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE,
        "native code of the program could not be compiled here: toolkit, headers or compiler are missing or do not fit", _BUILD,
    ),
    text_rule(
        "user.no-switches", r"NV_WARN_NOTHING_TO_DO",
        Verdict.USER_ERROR, Strength.CAUSE, 0.7, Blames.CODE,
        "a fabric manager was started on a machine that has no NVSwitches to manage",
        "https://docs.nvidia.com/datacenter/tesla/pdf/fabric-manager-user-guide.pdf",
    ),
    text_rule(
        "hip.no-binary",
        r"hipErrorNoBinaryForGpu|hipErrorInvalidDeviceFunction|hipErrorSharedObject|hipErrorInvalidKernelFile|CUDA_ERROR_NO_BINARY_FOR_GPU"
        r"|HSA_STATUS_ERROR_INVALID_ISA",
        Verdict.USER_ERROR, Strength.CAUSE, 0.8, Blames.CODE,
        "the program was not built for this kind of GPU", _HIP,
    ),
    text_rule(
        "hip.hardware", r"hipErrorECCNotCorrectable|HSA_STATUS_ERROR_(?:HARDWARE|FATAL)\w*|RAS .{0,40}poison",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.GPU,
        "the GPU's run-time reports damaged memory or hardware", _HIP,
    ),
    text_rule(
        "nic.port-state", r"state DOWN physical_state|Physical state: (?:Polling|Disabled|LinkErrorRecovery)|State: Down\b|==> \S+ \(Down\)",
        Verdict.NODE_FAULT, Strength.CAUSE, 0.65, Blames.NODE,
        "a port of the fabric has no link", _IBSTAT,
    ),
    text_rule(
        "nic.driver-error",
        r"(?:mlx5_core|bnxt_en|irdma|hns3).{0,80}(?:timed out|timeout|High Temperature|firmware error|Error recovery)"
        r"|mlx5_cmd_\w+:.{0,60}failed|\bena .{0,40}(?:Keep alive|Reset reason)",
        Verdict.NODE_FAULT, Strength.SYMPTOM, 0.5, Blames.NODE,
        "the driver of a network adapter reports trouble with its device", _MLX5,
    ),
    text_rule(
        "kernel.oops", r"BUG: unable to handle|kernel BUG at|Unable to handle kernel|\bOops: \d",
        Verdict.NODE_FAULT, Strength.PROOF, 0.8, Blames.NODE,
        "the kernel itself crashed", _OOPS,
    ),
    text_rule(
        "kernel.program-crash", r"segfault at [0-9a-f]+ ip|traps: \S+ (?:general protection|trap)",
        Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.45, Blames.RANK,
        "a program crashed; the kernel names the library in which", _OOPS,
    ),
    text_rule(
        "storage.disk-failing",
        r"Disk failure on|SMART .{0,40}(?:FAILED|FAILING)|self-assessment test result: FAILED|failed command: (?:READ|WRITE)|[Mm]etadata corruption",
        Verdict.STORAGE, Strength.PROOF, 0.8, Blames.NODE,
        "a disk of this node is failing", _RAID,
    ),
)  # fmt: skip
