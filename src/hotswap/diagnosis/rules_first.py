"""Rules for sentences that a general rule further down would take for something else. They are tried before all others of text."""

from __future__ import annotations

from hotswap.diagnosis.model import Blames, Strength, Verdict
from hotswap.diagnosis.rule import Rule, text_rule

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
_BMC = "https://docs.kernel.org/driver-api/ipmi.html"

FIRST: tuple[Rule, ...] = (
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
        r"Node unexpectedly rebooted|reboot timed out|Low TmpDisk|Duplicate jobid|batch job complete failure|[Ee]pilog error"
        r"|\b(?:down|drain|drng|fail)\*? .*Not responding|Reason=(?:NHC|Not responding)|ealth ?check failed",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
        "the reason for which the scheduler took the node out of service", _SLURM_NODE,
    ),
    text_rule(
        "slurm.node-description", r"Node configuration differs from hardware|gres\.conf",
        Verdict.USER_ERROR, Strength.CAUSE, 0.6, Blames.NODE,
        "the scheduler's description of the node is not what the node has", _SLURM_CONF,
    ),
    text_rule(
        "kube.node-broken",
        r"KubeletNotReady|Kubelet stopped posting node status|PLEG is not healthy|container runtime is down|KernelDeadlock"
        r"|ReadonlyFilesystem|UnexpectedAdmissionError|NodeStatusUnknown",
        Verdict.NODE_FAULT, Strength.PROOF, 0.8, Blames.NODE,
        "the node reports a condition in which it cannot run the pod", _KUBE_NODE,
    ),
    text_rule(
        "kube.no-room", r"FailedScheduling|\d nodes are available|Insufficient (?:nvidia\.com/gpu|memory|cpu)|Unschedulable",
        Verdict.UNKNOWN, Strength.CONTEXT, 0.3, Blames.NOBODY,
        "no node had room for the pod: it waits, or asks for what no node has",
        "https://kubernetes.io/docs/concepts/scheduling-eviction/kube-scheduler/",
    ),
    text_rule(
        "cloud.notice",
        r"this job is preempted|[Pp]reemption notice|Requeued job \d|TerminateScheduled|instance-action|[Mm]aintenance event"
        r"|\"EventType\": ?\"(?:Preempt|Terminate|Reboot|Redeploy)|preempted by|(?:was|is|been|got) preempted\b(?!,)"
        r"|marked for (?:preemption|reclaim)",
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
        r"DCGM_FR_(?:FALLEN|GPU_FALLEN|VOLATILE_DBE|UNCONTAINED|PENDING|RETIRED|ROW_REMAP|NVLINK|NVSWITCH|FAULTY|CORRUPT|FABRIC|PCI)",
        Verdict.NODE_FAULT, Strength.PROOF, 0.8, Blames.NODE,
        "a check of NVIDIA's health agent failed on this node", _DCGM,
    ),
    text_rule(
        "bmc.event", r"\bIERR\b|Uncorrectable (?:ECC|machine check)|Power Supply.{0,60}(?:Failure detected|AC lost)|Thermal Trip",
        Verdict.NODE_FAULT, Strength.PROOF, 0.85, Blames.NODE,
        "the board's own controller logged a failure of processor, memory, power or cooling", _BMC,
    ),
)  # fmt: skip
