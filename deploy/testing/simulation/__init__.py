"""The serving code on virtual time: real batchers, scheduler and policies over modelled stages."""
