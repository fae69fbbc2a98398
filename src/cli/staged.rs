//! A file that is complete before it takes its place.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A finished file beside its target; gone when dropped.
#[derive(Debug)]
pub(super) struct Staged {
    path: PathBuf,
    target: PathBuf,
}

impl Staged {
    /// Writes the content beside the target.
    pub(super) fn new(target: &Path, content: &[u8]) -> io::Result<Staged> {
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or(io::ErrorKind::InvalidInput)?);
        name.push(format!(".new-{}", std::process::id()));
        let path = target.with_file_name(name);
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        let staged = Staged { path, target: target.to_owned() };
        file.write_all(content)?;
        file.sync_all()?;
        Ok(staged)
    }

    /// Moves it to its place; with `replace`, over what is there.
    pub(super) fn place(self, replace: bool) -> io::Result<()> {
        if replace {
            return fs::rename(&self.path, &self.target);
        }
        match fs::hard_link(&self.path, &self.target) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
            // Not every file system has links.
            Err(_) if self.target.symlink_metadata().is_err() => fs::rename(&self.path, &self.target),
            done => done,
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_replaced_unless_asked_for_and_nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.json");
        drop(Staged::new(&target, b"dropped").unwrap());
        assert!(!target.exists());
        Staged::new(&target, b"first").unwrap().place(false).unwrap();
        let refused = Staged::new(&target, b"second").unwrap().place(false).unwrap_err();
        assert_eq!((refused.kind(), fs::read(&target).unwrap()), (io::ErrorKind::AlreadyExists, b"first".to_vec()));
        Staged::new(&target, b"third").unwrap().place(true).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"third");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
