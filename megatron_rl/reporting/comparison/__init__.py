"""Several runs beside each other: cells of equal settings, their differences, curves and samples,
as one page of HTML and its twin in Markdown."""
