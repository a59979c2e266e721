"""A Transformer that translates spelled numbers from English into French or German. Read `model`."""
