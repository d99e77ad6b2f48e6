"""The packed runtime in plain torch: the tokens of all images of a batch in one array, without padding."""
