"""Climate segmentation: cyclones and rivers of moisture, found in every pixel of a map of the weather. Read `model`."""
