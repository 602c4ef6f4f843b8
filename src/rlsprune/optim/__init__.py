"""Training by recursive least squares: the optimizer, its mathematics and the input statistics it keeps."""
