//! Arrays in `.npz` files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Writes arrays of little-endian bytes as numpy does, compressed.
pub fn write_npz(path: &Path, arrays: &[(&str, &str, &str, Vec<u8>)]) {
    let mut zip = ZipWriter::new(File::create(path).unwrap());
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
    for (name, descr, shape, data) in arrays {
        zip.start_file(format!("{name}.npy"), options).unwrap();
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
        zip.write_all(b"\x93NUMPY\x01\x00").unwrap();
        zip.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        zip.write_all(header.as_bytes()).unwrap();
        zip.write_all(data).unwrap();
    }
    zip.finish().unwrap();
}

/// The headers and data of all arrays.
pub fn read_npz(path: &Path) -> BTreeMap<String, (String, Vec<u8>)> {
    let mut zip = ZipArchive::new(File::open(path).unwrap()).unwrap();
    (0..zip.len())
        .map(|i| {
            let mut entry = zip.by_index(i).unwrap();
            let name = entry.name().unwrap().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
            let header = String::from_utf8(bytes[10..end].to_vec()).unwrap();
            (name, (header.trim_end().to_owned(), bytes[end..].to_vec()))
        })
        .collect()
}

/// The elements of a float array.
pub fn floats((header, data): &(String, Vec<u8>)) -> Vec<f64> {
    match header {
        h if h.contains("'<f2'") => data.as_chunks().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f64()).collect(),
        h if h.contains("'<f4'") => data.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect(),
        h => panic!("{h} is no float array"),
    }
}
