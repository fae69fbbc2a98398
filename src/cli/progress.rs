//! A spinner on stderr for work that takes a while.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::note;

/// Spins until it is dropped; silent when stderr is not a terminal.
pub(super) struct Spinner(ProgressBar);

impl Spinner {
    pub(super) fn new(message: impl Into<String>) -> Spinner {
        let target =
            if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target)
            .with_style(ProgressStyle::default_spinner())
            .with_message(message.into());
        bar.enable_steady_tick(Duration::from_millis(200));
        Spinner(bar)
    }

    pub(super) fn say(&self, message: impl Into<String>) {
        self.0.set_message(message.into());
    }

    /// Prints a note above the spinner.
    pub(super) fn note(&self, text: &str) {
        self.0.suspend(|| note(text));
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
