"""Starting a job: ``hotswap run`` with torchrun's flags."""
