"""What `hocket check` runs on each rank, and how it compares what the ranks wrote down."""
