"""What `hocket bench` measures with: a world of ranks, the systems in it, and the tables that come of it."""
