"""A recommender with embedding tables on MovieLens-100K. Read `model`."""
