"""EDSR: super-resolution of photographs. Read `model`, then `data`, `metrics` and `workload`."""
