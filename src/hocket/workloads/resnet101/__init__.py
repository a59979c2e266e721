"""ResNet-101 that names all digits in an image. Read `model`."""
