// Files of a run, which Python code reads and writes through vfs, like all durable files.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "vfs/vfs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bunkbed {

void bind_files(nb::module_& m) {
  m.def(
      "write_file",
      [](const std::string& path, const nb::bytes& data) {
        const WithoutGil without_gil;
        const auto file = vfs::current().create_small(path);
        if (data.size() > 0) file->write(data.c_str(), data.size(), 0);
        file->sync();
      },
      "path"_a, "data"_a,
      "Write a new file. Its bytes are then durable, its name after sync_directory(). FileExistsError: it exists.");
  m.def(
      "read_file",
      [](const std::string& path) {
        std::string data;
        {
          const WithoutGil without_gil;
          const auto file = vfs::current().open(path, false);
          data.resize(file->size());
          file->read(data.data(), data.size(), 0);
        }
        return nb::bytes(data.data(), data.size());
      },
      "path"_a, "Return the bytes of a regular file. FormatError for anything else, without waiting for it.");
  m.def(
      "link_file",
      [](const std::string& from, const std::string& to) {
        const WithoutGil without_gil;
        vfs::current().link(from, to);
      },
      "from_path"_a, "to_path"_a, "Give a file a second name. FileExistsError: the name is taken.");
  m.def(
      "remove_file",
      [](const std::string& path) {
        const WithoutGil without_gil;
        vfs::current().remove(path);
      },
      "path"_a, "Remove a file, if it exists.");
  m.def(
      "sync_directory",
      [](const std::string& path) {
        const WithoutGil without_gil;
        vfs::current().sync_directory(path);
      },
      "path"_a, "Make the names in a directory durable.");
  m.def(
      "make_directories",
      [](const std::string& path) {
        const WithoutGil without_gil;
        vfs::current().make_directories(path);
      },
      "path"_a, "Make a directory and its missing parents. Their names are durable when it returns.");
  m.def(
      "list_directory",
      [](const std::string& path) {
        const WithoutGil without_gil;
        return vfs::current().list(path);
      },
      "path"_a, "Return the names in a directory, sorted. FileNotFoundError: there is none.");
}

}  // namespace bunkbed
