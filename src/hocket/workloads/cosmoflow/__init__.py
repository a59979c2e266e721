"""CosmoFlow: a network of 3-D convolutions that reads the parameters of a universe off its matter. Read `model`."""
