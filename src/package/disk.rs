//! What saving asks of the file system, as a trait so that tests can make any step of it fail.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// The steps of a save.
pub(super) trait Disk {
    /// Makes a directory, which must not exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Writes a new file and makes it durable.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Copies a file's content by the OS and makes it durable.
    fn copy(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes a symbolic link with this text.
    fn link(&self, text: &Path, at: &Path) -> io::Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Moves `from` to `to`, where nothing is.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Swaps two paths in one step; [`io::ErrorKind::Unsupported`] where the file system has no such thing.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug)]
pub(super) struct Os;

impl Disk for Os {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        check_file_size(bytes.len() as u64)?;
        let mut file = File::options().write(true).create_new(true).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn copy(&self, from: &Path, to: &Path) -> io::Result<()> {
        check_file_size(fs::metadata(from)?.len())?;
        fs::copy(from, to)?;
        // Windows flushes only what is open for writing.
        File::options().read(true).write(cfg!(windows)).open(to)?.sync_all()
    }

    #[cfg(unix)]
    fn link(&self, text: &Path, at: &Path) -> io::Result<()> {
        std::os::unix::fs::symlink(text, at)
    }

    #[cfg(not(unix))]
    fn link(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    #[cfg(unix)]
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    #[cfg(not(unix))]
    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match rename_with(from, to, Rename::NoReplace) {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                if to.symlink_metadata().is_ok() {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                fs::rename(from, to)
            }
            done => done,
        }
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        rename_with(a, b, Rename::Exchange)
    }
}

#[derive(Clone, Copy)]
enum Rename {
    NoReplace,
    Exchange,
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn rename_with(from: &Path, to: &Path, how: Rename) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    let flags = match how {
        Rename::NoReplace => RenameFlags::NOREPLACE,
        Rename::Exchange => RenameFlags::EXCHANGE,
    };
    renameat_with(CWD, from, CWD, to, flags).map_err(|e| match e {
        Errno::INVAL | Errno::NOSYS | Errno::NOTSUP => io::ErrorKind::Unsupported.into(),
        e => e.into(),
    })
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn rename_with(_: &Path, _: &Path, _: Rename) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Fails when a file of this size is above the process's limit, where writing it would end the process by a signal.
#[cfg(unix)]
fn check_file_size(len: u64) -> io::Result<()> {
    use rustix::process::{Resource, getrlimit};
    match getrlimit(Resource::Fsize).current {
        Some(limit) if len > limit => Err(io::ErrorKind::FileTooLarge.into()),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn check_file_size(_: u64) -> io::Result<()> {
    Ok(())
}
