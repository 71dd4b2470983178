"""What plans send between devices, and how full their pipelines are."""
