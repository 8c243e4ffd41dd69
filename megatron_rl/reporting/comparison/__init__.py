"""Several runs side by side: variants of equal settings, their differences, curves and samples."""
