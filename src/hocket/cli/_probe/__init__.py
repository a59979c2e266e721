"""What `hocket cluster probe` runs on its ranks."""
