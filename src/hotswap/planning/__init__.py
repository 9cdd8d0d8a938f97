"""What protection costs and what it survives, before a job is started."""
