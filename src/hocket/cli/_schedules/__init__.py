"""What the verbs `schedule` and `tune` share."""
