"""What healthy programs, kernels and schedulers print all day must not be taken for a cause."""

from __future__ import annotations

import pytest

from hotswap.diagnosis import RuleBook, diagnose
from hotswap.diagnosis.readers import literals_of, read_text
from hotswap.diagnosis.table import RULES

PROGRESS = (
    "iteration 7/ 100 | lm loss: 2.1 | grad norm: 0.4 | loss scale: 1.0 | number of skipped iterations:   0 |",
    "step: 10 loss: 7.1234 grad_norm: 0.31 memory: 20.1GiB(21%) tps: 5000 mfu: 40%",
    "{'loss': 1.6693, 'grad_norm': 0.5, 'learning_rate': 0.00019, 'epoch': 0.23}",
    "Epoch[1] Batch[7] Speed: 143.86 samples/sec, Loss=1.21, Norm=0.4",
    "Epoch 3:  17%|#7        | 170/1000 [00:51<04:10, 3.31it/s, loss=0.25, val_loss=0.31]",
)

HEALTHY = """
node-1:7:8 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node-1:7:8 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
node-1:7:8 [0] NCCL INFO NET/Plugin: load returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory
node-1:7:8 [0] NCCL INFO NET/IB : No device found.
node-1:7:8 [0] NCCL INFO comm 0x1 rank 0 nranks 8 cudaDev 0 busId 1000 - Destroy COMPLETE
W tensorflow/dso_loader.cc:64] Could not load dynamic library 'libx.so.6'; dlerror: libx.so.6: cannot open shared object file
[W socket.cpp:601] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97).
huggingface/tokenizers: The current process just got forked. Disabling parallelism to avoid deadlocks...
[WARNING] [runner.py:196:fetch_hostfile] Unable to find hostfile, will proceed with local resources only.
  check_for_nan_in_loss_and_grad .................. True
  distributed_timeout_minutes ..................... 30
  exit_on_missing_checkpoint ...................... False
could not find arguments in the checkpoint ...
iteration 7/ 100 | lm loss: 2.1 | number of skipped iterations:   0 | number of nan iterations:   0 |
step: 10 loss: 7.1234 memory: 20.1GiB(21%) tps: 5000 mfu: 40%
{'loss': 1.6693, 'grad_norm': 0.5, 'learning_rate': 0.00019, 'epoch': 0.23}
Mar  2 10:00:00 node-1 kernel: mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged
Mar  2 10:00:00 node-1 kernel: EDAC MC0: Giving out device to module amd64_edac controller F19h
Mar  2 10:00:00 node-1 kernel: MCE: In-kernel MCE decoding enabled.
Mar  2 10:00:00 node-1 kernel: pcieport 0000:00:03.0: AER: enabled with IRQ 29
Mar  2 10:00:00 node-1 kernel: EXT4-fs (md0): re-mounted r/w. Quota mode: none.
Mar  2 10:00:00 node-1 systemd[1]: Started NVIDIA fabric manager service.
  MemoryPressure   False   Mon, 02 Mar 2026   KubeletHasSufficientMemory   kubelet has sufficient memory available
  DiskPressure     False   Mon, 02 Mar 2026   KubeletHasNoDiskPressure     kubelet has no disk pressure
  Ready            True    Mon, 02 Mar 2026   KubeletReady                 kubelet is posting ready status
JobId=77 JobName=train JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0
        Remapping Failure Occurred        : No
        HW Thermal Slowdown               : Not Active
process exited with status 0
EarlyStopping: val_loss improved from inf to 0.5312
best loss so far: inf
fp16: gradient overflow in step 3, loss scale halved to 32768
worker-3 is not ready yet, waiting
retrying download of shard 7 after a time-out (attempt 1 of 5)
NodeName=gpu-3 CoresPerSocket=64 State=ALLOCATED ThreadsPerCore=2
gpu up 2-00:00:00 8 alloc gpu-[1-8]
Waiting in store based barrier to initialize process group for rank: 1, key: k:1 (world_size=6, worker_count=5, timeout=0:10:00)
checking tensors for nan every 100 steps
/usr/lib/python3/dist-packages/numpy: RuntimeWarning: invalid value encountered in divide
Exception ignored in: <function Pool.__del__ at 0x7f>
"""


@pytest.mark.parametrize("line", HEALTHY.strip("\n").splitlines())
def test_a_healthy_line_is_no_confident_verdict(line: str) -> None:
    found = diagnose(read_text(line))
    assert not found.confident, found


def test_healthy_lines_do_not_hide_the_cause() -> None:
    found = diagnose(read_text(HEALTHY + "OSError: [Errno 116] Stale file handle\n"))
    assert found.rules[0] == "storage.stale-handle"


def test_lines_of_progress_hold_nothing_that_is_looked_for() -> None:
    literals = literals_of(RuleBook(RULES))
    for line in PROGRESS:
        assert not [literal for literal in literals if literal in line], (
            "the scanner would look at every line of a healthy log"
        )
