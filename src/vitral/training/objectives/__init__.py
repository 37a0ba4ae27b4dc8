"""Training objectives, a file each: functions of model and batch. A new objective is a new file, never a new loop."""
