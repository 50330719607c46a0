"""Settings of lines of tables that the main job does not need."""
