"""What makes a run survive and be seen: its folder, checkpoints, records, display."""
