"""ResNet-50 on made-up images, to measure throughput. Read `model`."""
