//! Copies the files of a package.

use std::fs;
use std::path::{Component, Path};

use super::disk::Disk;
use super::error::PackageError;

/// Directories nest no deeper than this; followed links could otherwise lead in circles.
const MAX_DEPTH: u32 = 32;

/// Copies everything under `from` into the existing directory `to`, except the file at the relative path `skip`.
///
/// A link that stays inside `root` is copied as a link; one that leaves it is refused, or with `follow_symlinks` every
/// link is replaced by what it leads to.
pub(super) struct TreeCopy<'a> {
    pub(super) disk: &'a dyn Disk,
    pub(super) root: &'a Path,
    pub(super) skip: &'a Path,
    pub(super) follow_symlinks: bool,
}

impl TreeCopy<'_> {
    pub(super) fn run(&self, to: &Path) -> Result<(), PackageError> {
        self.dir(self.root, to, MAX_DEPTH)
    }

    fn dir(&self, from: &Path, to: &Path, depth: u32) -> Result<(), PackageError> {
        let deeper = depth
            .checked_sub(1)
            .ok_or_else(|| PackageError::io("copy", from)(std::io::Error::other("directories nest too deeply")))?;
        let mut names = Vec::new();
        for entry in fs::read_dir(from).map_err(PackageError::io("list", from))? {
            names.push(entry.map_err(PackageError::io("list", from))?.file_name());
        }
        names.sort();
        for name in names {
            self.entry(&from.join(&name), &to.join(&name), deeper)?;
        }
        self.disk.sync_dir(to).map_err(PackageError::io("sync", to))
    }

    fn entry(&self, from: &Path, to: &Path, depth: u32) -> Result<(), PackageError> {
        if from.strip_prefix(self.root).is_ok_and(|relative| relative == self.skip) {
            return Ok(());
        }
        let link = from.symlink_metadata().map_err(PackageError::io("read", from))?;
        if link.is_symlink() && !self.follow_symlinks {
            let text = fs::read_link(from).map_err(PackageError::io("read", from))?;
            if !self.stays(from, &text) {
                return Err(PackageError::Escapes { path: from.to_owned(), package: self.root.to_owned() });
            }
            return self.disk.link(&text, to).map_err(PackageError::io("link", to));
        }
        let kind = fs::metadata(from).map_err(PackageError::io("read", from))?;
        if kind.is_dir() {
            self.disk.create_dir(to).map_err(PackageError::io("create", to))?;
            return self.dir(from, to, depth);
        }
        if kind.is_file() {
            return self.disk.copy(from, to).map_err(PackageError::io("copy to", to));
        }
        Err(PackageError::io("copy", from)(std::io::Error::other("neither a file nor a directory")))
    }

    /// Whether a relative link, followed from where it lies, never leaves the package.
    fn stays(&self, link: &Path, text: &Path) -> bool {
        let Ok(relative) = link.strip_prefix(self.root) else { return false };
        let mut depth = relative.components().count() as i64 - 1;
        for c in text.components() {
            match c {
                Component::Normal(_) => depth += 1,
                Component::ParentDir => depth -= 1,
                Component::CurDir => {}
                Component::RootDir | Component::Prefix(_) => return false,
            }
            if depth < 0 {
                return false;
            }
        }
        super::weights::inside(self.root, link, false).is_ok()
    }
}
