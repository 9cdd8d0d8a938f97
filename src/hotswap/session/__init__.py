"""The worker's side: the session a training script talks to."""
