"""What a job has left behind, made readable."""
