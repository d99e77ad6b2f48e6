"""A local web page to see what merging does to an image: `adamerge explore`."""
